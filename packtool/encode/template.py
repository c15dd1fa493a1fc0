"""Chat templates, rendered as transformers renders them (``apply_chat_template``), without importing it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packtool.errors import ConfigError

# What a template can run into on a conversation it was not written for.
_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError),
)
_DICT_NAMES = frozenset(dir(dict))
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class TemplateFailure(ValueError):
    """The template refused a conversation (``raise_exception``) or broke on it."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant says; here it renders its body and nothing more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for what nearly every attribute of a chat template is: a key of a message."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML; templates for models want plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: the Jinja text.
        variables: ``bos_token`` and its like.
        content_as_list: contents that are text are given as a list of one text.
    """

    def __init__(self, text: str, variables: Mapping[str, str], content_as_list: bool = False) -> None:
        self._content_as_list = content_as_list
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as one string.

        Raises:
            TemplateFailure: if the template refuses it.
        """
        try:
            return self._template.render(
                messages=[self._prepared(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except _FAILURES as error:
            raise TemplateFailure(str(error) or type(error).__name__) from error

    def _prepared(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if self._content_as_list and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        return _with_reasoning_names(message)


def _with_reasoning_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
