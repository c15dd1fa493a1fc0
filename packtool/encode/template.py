"""Chat templates, rendered as transformers renders them (``apply_chat_template``), without importing it.

Templates that end no answer: what the model stops at is put behind the last one.

GLM's turns end where the next one opens, and what opens it is among the tokens that generation stops at
(``generation_config.json``)::

    <|user|>Why?<|assistant|>So.<|user|>And?<|assistant|>Thus.              as the template writes it
    <|user|>Why?<|assistant|>So.<|user|>And?<|assistant|>Thus.<|user|>      with it

So ``<|user|>`` is what an answer is trained to end with, as in ms-swift and TRL [read in both]. That
``<|observation|>`` is what tool calls end with follows from the template and from what generation stops at alone.

A sample as chat templates get it.

Turns that a chat template leaves out, though a row has them: a second system prompt, a tool's answer.

Many templates know of one system prompt, before everything else, and pass over all others without a word. What a row
says must not vanish so; whether it does is found out by rendering the same roles once more, with a mark for each text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packtool.encode.control import Shield
from packtool.errors import ConfigError
from packtool.rows.forms.columns import RowProblem
from packtool.rows.sample import Sample, Turn

# What a template can run into on a conversation it was not written for.
_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    ArithmeticError,
)
_COUNTED, _BOUNDED = "packtool_counted", "packtool_bounded"
_MOST_ROUNDS = 10_000_000
"""Rounds of all loops of one rendering: some seconds."""
_MOST_CHARS = 1 << 28
_DICT_NAMES = frozenset(dir(dict))
_OF_LOOPS = frozenset(("_loop_vars", "_block_vars"))
"""What a compiled template gives to the calls in its loops and blocks, besides what stands there."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_THINKING_SWITCHES = ("enable_thinking", "thinking")


class TemplateFailure(ValueError):
    """The template refused a conversation (``raise_exception``) or broke on it."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant says; here it renders its body and nothing more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way for what nearly all attributes and calls of a chat template are: a key of a
    message, and ``namespace(...)``.

    It also counts: a loop is charged for its rounds when it begins, a macro for each call, and a product for its size,
    so that a template that would run for hours, or fill the memory, ends. What is kept in a variable or given to a
    macro is held to a size too: a text that doubles in each round (``x ~ x``) must be kept to be doubled again. The
    sandbox itself bounds one ``range`` only, not loops in loops. What a single filter makes of a text is not bounded.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rounds_left = _MOST_ROUNDS
        self.filters[_COUNTED], self.filters[_BOUNDED] = _counted, _bounded

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(jinja2.nodes.For):
            loop.iter = _filtered(loop.iter, _COUNTED, loop.lineno)
        for assigned in template.find_all(jinja2.nodes.Assign):
            assigned.node = _filtered(assigned.node, _BOUNDED, assigned.lineno)
        for block in template.find_all(jinja2.nodes.AssignBlock):
            block.filter = _filtered(block.filter, _BOUNDED, block.lineno)
        return template

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja2)
        if isinstance(__obj, jinja2.runtime.Macro):
            __self.take_rounds(1)
            for value in (*args, *kwargs.values()):
                _bounded(value)
        elif __obj is jinja2.utils.Namespace and _OF_LOOPS.isdisjoint(kwargs):
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def take_rounds(self, count: int) -> None:
        """Take so many rounds off those that a rendering may have.

        Raises:
            TemplateFailure: if there are no more.
        """
        self.rounds_left -= count
        if self.rounds_left < 0:
            raise TemplateFailure(f"the template's loops and macros have more than {_MOST_ROUNDS:,} rounds")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of_product(operator, left, right) > _MOST_CHARS:
            raise TemplateFailure(f"{operator} makes something of more than {_MOST_CHARS:,} characters or digits")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


@jinja2.pass_context  # with the context, because what needs none is computed when a template is compiled
def _counted(context: jinja2.runtime.Context, items: Any) -> Any:
    """What a loop goes over, as it is; its rounds are taken off those that a rendering may have."""
    environment = context.environment
    assert isinstance(environment, _Environment)
    if not hasattr(items, "__len__") and not isinstance(items, jinja2.Undefined):
        items = list(islice(items, environment.rounds_left + 1))
    environment.take_rounds(len(items))
    return items


def _filtered(node: Any, name: str, lineno: int) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=lineno)


def _bounded(value: Any) -> Any:
    """A value as it is, if it is no text and no list that only grows."""
    most = _MOST_CHARS if isinstance(value, str) else _MOST_ROUNDS if isinstance(value, (list, tuple)) else None
    if most is not None and len(value) > most:
        raise TemplateFailure(f"the template keeps something of more than {most:,} characters or items")
    return value


def _size_of_product(operator: str, left: Any, right: Any) -> int:
    """Characters, items or bits that ``*`` and ``**`` make, about."""
    for one, other in ((left, right), (right, left)):
        if operator == "*" and isinstance(one, (str, list, tuple)) and isinstance(other, int):
            return len(one) * other
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    return 0


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML; templates for models want plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _new_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=8)
def _compiled(text: str) -> CodeType:
    return _new_environment().compile(text)


class ChatTemplate:
    """A compiled chat template.

    Args:
        text: the Jinja text.
        variables: ``bos_token`` and its like.
        content_as_list: contents that are text are given as a list of one text.
    """

    def __init__(self, text: str, variables: Mapping[str, str], content_as_list: bool = False) -> None:
        self._content_as_list = content_as_list
        self._environment = environment = _new_environment()
        try:
            code = _compiled(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        # A dictionary, which is copied at once for each conversation; Jinja's own is a chain of two.
        self._template = environment.template_class.from_code(environment, code, dict(environment.globals))
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        thinks: bool | None = None,
    ) -> str:
        """The conversation as one string.

        Args:
            messages: with ``role`` and ``content``.
            tools: their descriptions.
            add_generation_prompt: whether the opening of an assistant's turn follows at the end.
            thinks: sets the switch of templates for hybrid thinking, which is named ``enable_thinking`` or
                ``thinking``; None leaves it undefined.

        Raises:
            TemplateFailure: if the template refuses it.
        """
        self._environment.rounds_left = _MOST_ROUNDS
        pieces, num_chars = [], 0
        switch = {} if thinks is None else dict.fromkeys(_THINKING_SWITCHES, thinks)
        try:
            for piece in self._template.generate(
                messages=[self._prepared(message) for message in messages],
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **switch},
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > _MOST_CHARS:
                    raise TemplateFailure(f"the template writes more than {_MOST_CHARS:,} characters")
        except TemplateFailure:
            raise
        except RecursionError as error:  # whose words depend on who called
            raise TemplateFailure("the template calls itself without end") from error
        except _FAILURES as error:
            raise TemplateFailure(str(error) or type(error).__name__) from error
        return "".join(pieces)

    def _prepared(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if self._content_as_list and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        return _with_reasoning_names(message)


def _with_reasoning_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.keys().isdisjoint(REASONING_NAMES):
        return message
    reasoning = next((message[name] for name in REASONING_NAMES if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


_QUESTION, _ANSWER = "packtoolquestion", "packtoolanswer"
_ENDED = (
    "{{%- if messages and messages[-1].role == 'assistant' and not add_generation_prompt -%}}"
    "{{{{- ({tool!r} if messages[-1].tool_calls else {user!r}) -}}}}{{%- endif -%}}"
)


def ended_template(text: str, variables: Mapping[str, str], stops: Callable[[], Collection[str]]) -> tuple[str, str]:
    """A chat template that ends the last answer too, if it ends answers only by opening the next turn.

    Args:
        text: the template.
        variables: ``bos_token`` and its like.
        stops: gives the tokens that generation stops at, if they are needed.

    Returns:
        the template and the mark that it now has behind the last answer; as it was and "", where it ends answers by
        itself, or by what generation does not stop at.
    """
    for as_list in (False, True):
        try:
            template = ChatTemplate(text, variables, content_as_list=as_list)
        except ConfigError:  # no valid template, which is told where it is used
            return text, ""
        if user := _mark_between(template, "user", stops):
            tool = _mark_between(template, "tool", stops) or user
            return text + _ENDED.format(user=user, tool=tool), user
    return text, ""


def _mark_between(template: ChatTemplate, role: str, stops: Callable[[], Collection[str]]) -> str:
    """What a template writes between an answer and the message of a role, "" if that is nothing to stop at."""
    asked: list[dict[str, Any]] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        short = template.render(asked)
        long = template.render([*asked, {"role": role, "content": _QUESTION}])
    except TemplateFailure:
        return ""
    written, behind = short.partition(_ANSWER)[2], long.partition(_ANSWER)[2]
    if _ANSWER not in short or written.strip() or not behind.startswith(written):
        return ""
    mark = behind.removeprefix(written)
    stop = next((stop for stop in stops() if mark.lstrip().startswith(stop)), None)
    return "" if stop is None else mark[: mark.index(stop) + len(stop)]


class CannotRender(RowProblem):
    """A sample that no template can render."""


def message_of(turn: Turn, shield: Shield, kinds: Sequence[str], as_list: bool) -> dict[str, Any]:
    """A turn as the template gets it."""
    text = shield.text(shield.media(turn.content, kinds))
    content = shield.as_list(text) if as_list else text
    return {"role": turn.role, "content": content, **shield.value(turn.extra)}


def strings_of(sample: Sample) -> list[str]:
    """Every string of a sample that a template may print.

    Raises:
        CannotRender: if a template might print NaN or an infinite number, which no JSON has.
    """
    found = [turn.content for turn in sample.turns]
    stack: list[object] = [turn.extra for turn in sample.turns if turn.extra]
    stack += list(sample.tools or ())
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise CannotRender("invalid_content", f"the number {value} stands in tools or in a tool call")
    return found


_REMEMBERED = 10_000
_Roles = tuple[Any, ...]


class LeftOut:
    """Says which turn a template leaves out, for every order of roles that rows have.

    Args:
        render: messages and tools to text, as the template does it.
    """

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]], Any], str]) -> None:
        self._render = render
        self._known: dict[_Roles, int | None] = {}

    def first(self, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]], tools: Any) -> int | None:
        """Number of the first turn, not an assistant's, that has a text of which nothing is rendered; None if none is.

        Args:
            turns: of a row.
            messages: the same as the template gets them.
            tools: as the template gets them.
        """
        roles = (bool(tools), *((turn.role, bool(turn.content.strip()), *sorted(turn.extra)) for turn in turns))
        if roles in self._known:
            return self._known[roles]
        found = self._look(turns, messages, tools)
        if len(self._known) < _REMEMBERED:
            self._known[roles] = found
        return found

    def _look(self, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]], tools: Any) -> int | None:
        marks = {
            number: f"packtoolturn{number}end"
            for number, turn in enumerate(turns)
            if turn.role != "assistant" and turn.content.strip()
        }
        marked = [_with_text(message, marks.get(number)) for number, message in enumerate(messages)]
        try:
            rendered = self._render(marked, tools)
        except TemplateFailure:
            return None  # it looks into the texts; the row's own were rendered
        return next((number for number, mark in marks.items() if mark not in rendered), None)


def _with_text(message: Mapping[str, Any], text: str | None) -> Mapping[str, Any]:
    if text is None:
        return message
    return {**message, "content": text if isinstance(message["content"], str) else [{"type": "text", "text": text}]}
