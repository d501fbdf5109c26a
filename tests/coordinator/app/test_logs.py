"""A line of the log is what structlog's own renderer of key=value pairs writes."""

from __future__ import annotations

import structlog
from hypothesis import given
from hypothesis import strategies as st

from coordinator.app.logs import FIRST, logfmt

THEIRS = structlog.processors.LogfmtRenderer(key_order=FIRST, bool_as_flag=False)
TEXTS = st.text(st.sampled_from('ab =\\"\n\té'), max_size=8)
VALUES = TEXTS | st.none() | st.booleans() | st.integers() | st.floats()
KEYS = st.sampled_from(["run", "round", "member", "timestamp", "level", "event"])


@given(st.dictionaries(KEYS, VALUES))
def test_a_line_has_the_usual_form(fields: dict[str, object]) -> None:
    assert logfmt(None, "info", dict(fields)) == THEIRS(None, "info", dict(fields))


def test_time_level_and_event_come_first_and_a_line_is_one_line() -> None:
    line = logfmt(None, "info", {"run": "r 1", "why": "a\nb", "event": "lost", "level": "info", "timestamp": "now"})
    assert line == 'timestamp=now level=info event=lost run="r 1" why=a\\nb'
