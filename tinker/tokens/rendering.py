"""Rendering a chat template's jinja source as Hugging Face does, in a sandbox: templates come from strangers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tinker.tokens.errors import TokenizerError

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[Messages, bool], str]


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for other trainers; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, variables: Mapping[str, Any], now: datetime) -> Render:
    """A function (messages, add_generation_prompt) -> text. `variables` are the special tokens and the template's own options;
    `now` is what `strftime_now` formats, so that one template object renders the same text for ever. Raises TokenizerError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = now.strftime
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerError(f"the chat template does not compile ({error}); fix chat_template.jinja") from error

    def render(messages: Messages, add_generation_prompt: bool) -> str:
        try:
            return template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **variables
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TokenizerError(f"the chat template refuses messages with roles [{roles}]: {error}") from error

    return render


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
