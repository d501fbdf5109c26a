"""The log of a daemon: one line per event on stderr, as key=value pairs or as a JSON object.

A run logs every barrier that opens, so a line is written a thousand times in a second at worst: loggers are bound once, and the pairs are
written by a function of ours (structlog's own looks at every character of every key).
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Literal

import structlog

LogFormat = Literal["logfmt", "json"]
FIRST = ("timestamp", "level", "event")
_QUOTED = re.compile(r'[ ="\\\n]')


def log_to_stderr(format: LogFormat = "logfmt") -> None:
    """Call once, in a process of its own."""
    render: structlog.typing.Processor = structlog.processors.JSONRenderer() if format == "json" else logfmt
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def logfmt(_: object, __: str, fields: structlog.typing.EventDict) -> str:
    """The line: time, level and event first. Values with spaces, = or quotes are quoted, line breaks are escaped."""
    first = [f"{key}={_value(fields.pop(key, None))}" for key in FIRST]
    return " ".join([*first, *[f"{key}={_value(value)}" for key, value in fields.items()]])


def _value(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if not _QUOTED.search(text):
        return text
    quoted = " " in text or "=" in text or '"' in text
    text = (text.replace("\\", "\\\\") if quoted else text).replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"' if quoted else text
