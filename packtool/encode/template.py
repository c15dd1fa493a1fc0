"""Chat templates, rendered as transformers renders them (``apply_chat_template``), without importing it.

GLM's turns end where the next one opens, and generation stops at the opening token (``generation_config.json``). Such
templates are extended by that token after the last answer::

    <|user|>Why?<|assistant|>So.<|user|>And?<|assistant|>Thus.              as the template writes it
    <|user|>Why?<|assistant|>So.<|user|>And?<|assistant|>Thus.<|user|>      extended

So answers are trained to end with ``<|user|>``, as in ms-swift and TRL [read in both], and tool calls with
``<|observation|>``, which follows from the template and the stop tokens.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from types import CodeType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packtool.errors import ConfigError
from packtool.rows.forms.columns import RowProblem
from packtool.rows.sample import Sample, Turn

# Errors of a template on a conversation that it was not written for.
_FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_COUNTED, _BOUNDED = "packtool_counted", "packtool_bounded"
_MAX_ROUNDS = 10_000_000
"""Maximum rounds of all loops of one rendering, which take some seconds."""
_MAX_CHARS = 1 << 28
_DICT_NAMES = frozenset(dir(dict))
_LOOP_ARGUMENTS = frozenset(("_loop_vars", "_block_vars"))
"""Arguments that a compiled template adds to the calls in its loops and blocks."""
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_REASONING_NAMES = frozenset(REASONING_NAMES)
_THINKING_SWITCHES = ("enable_thinking", "thinking")
_MAX_REMEMBERED = 10_000


class TemplateFailure(ValueError):
    """The template refused a conversation (``raise_exception``), or failed on it."""


class _GenerationTag(jinja2.ext.Extension):
    """The ``{% generation %}`` block, which marks the assistant's text: only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on time and memory, and a fast path for keys of messages and ``namespace(...)``.

    Jinja bounds a single ``range``, but not nested loops. Here, the rounds of all loops and the calls of macros are
    counted, and the sizes of products, variables and macros' arguments are bounded. A text that doubles in each round
    (``x ~ x``) passes through a variable, so templates that would run for hours or fill the memory fail. The output of
    a single filter is not bounded.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rounds_left = _MAX_ROUNDS
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
        elif __obj is jinja2.utils.Namespace and _LOOP_ARGUMENTS.isdisjoint(kwargs):
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def take_rounds(self, count: int) -> None:
        """Count rounds of the current rendering; raise TemplateFailure above the maximum."""
        self.rounds_left -= count
        if self.rounds_left < 0:
            raise TemplateFailure(f"the template's loops and macros need more than {_MAX_ROUNDS:,} rounds")

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if _size_of_product(operator, left, right) > _MAX_CHARS:
            raise TemplateFailure(f"the result of {operator} has more than {_MAX_CHARS:,} characters or digits")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


@jinja2.pass_context  # filters without a context would be computed when a template is compiled
def _counted(context: jinja2.runtime.Context, items: Any) -> Any:
    """Return the items of a loop after counting them as rounds; the filter around what each loop iterates over."""
    environment = context.environment
    assert isinstance(environment, _Environment)
    if not hasattr(items, "__len__") and not isinstance(items, jinja2.Undefined):
        items = list(islice(items, environment.rounds_left + 1))
    environment.take_rounds(len(items))
    return items


def _filtered(node: Any, name: str, lineno: int) -> jinja2.nodes.Filter:
    """Return the syntax tree of ``node | name``."""
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=lineno)


def _bounded(value: Any) -> Any:
    """Return a value; raise TemplateFailure if it is a text or a list that is too long."""
    max_length = _MAX_CHARS if isinstance(value, str) else _MAX_ROUNDS if isinstance(value, (list, tuple)) else None
    if max_length is not None and len(value) > max_length:
        raise TemplateFailure(f"a variable of the template has more than {max_length:,} characters or items")
    return value


def _size_of_product(operator: str, left: Any, right: Any) -> int:
    """Estimate the characters, items or bits of the result of ``*`` or ``**``."""
    for one, other in ((left, right), (right, left)):
        if operator == "*" and isinstance(one, (str, list, tuple)) and isinstance(other, int):
            return len(one) * other
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
    return 0


def template_variables(text: str) -> set[str]:
    """Return the names that a chat template reads and does not set itself; none if it is not valid Jinja."""
    try:
        return jinja2.meta.find_undeclared_variables(_new_environment().parse(text))
    except jinja2.TemplateSyntaxError:
        return set()


def _new_environment() -> _Environment:
    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML; templates for models want plain JSON.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@lru_cache(maxsize=8)
def _compiled(text: str) -> CodeType:
    return _new_environment().compile(text)


class ChatTemplate:
    """A compiled chat template.

    Args:
        variables: special tokens by name, such as ``bos_token``, and other arguments, such as ``enable_thinking``.
        content_as_list: pass a content that is a text as a list with one text.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], content_as_list: bool = False) -> None:
        self._content_as_list = content_as_list
        self._environment = environment = _new_environment()
        try:
            code = _compiled(text)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        # The globals are copied for each conversation, which is fast for a plain dictionary; Jinja's is a chain of two.
        self._template = environment.template_class.from_code(environment, code, dict(environment.globals))
        self._context = self._template.new_context()
        self._variables = dict(variables)
        self._missing_turns: dict[tuple[Any, ...], int | None] = {}

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return a copy with further variables, which take precedence; the compiled code is shared."""
        template = copy.copy(self)
        template._variables, template._missing_turns = {**self._variables, **arguments}, {}
        return template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        thinks: bool | None = None,
    ) -> str:
        """Render a conversation as one string; TemplateFailure if the template refuses it, or exceeds the bounds.

        ``thinks`` is the value of ``enable_thinking`` and ``thinking``, the switch of templates with hybrid thinking;
        None leaves both undefined.
        """
        switches = {} if thinks is None else dict.fromkeys(_THINKING_SWITCHES, thinks)
        arguments = {**self._variables, **switches, "documents": None, "add_generation_prompt": add_generation_prompt}
        arguments["tools"] = list(tools) if tools else None
        try:
            arguments["messages"] = [self._prepared(message) for message in messages]
            return self._render_with(arguments)
        except TemplateFailure:
            raise
        except RecursionError as error:  # its own message depends on the caller
            raise TemplateFailure("the template calls itself without end") from error
        except _FAILURES as error:
            raise TemplateFailure(str(error) or type(error).__name__) from error

    def _render_with(self, arguments: Mapping[str, Any]) -> str:
        """Run the compiled template; TemplateFailure if it exceeds the bounds on loops or on the text's length."""
        self._environment.rounds_left = _MAX_ROUNDS  # counted down by the environment
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.root_render_func(self._context_of(arguments)):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > _MAX_CHARS:
                raise TemplateFailure(f"the template writes more than {_MAX_CHARS:,} characters")
        return "".join(pieces)

    def _context_of(self, arguments: Mapping[str, Any]) -> jinja2.runtime.Context:
        """Return the context for a rendering with these variables: always the same one, because a new one is slow."""
        context = self._context
        context.parent = {**self._template.globals, **arguments}
        context.vars = {}
        context.exported_vars = set()
        context.eval_ctx = jinja2.nodes.EvalContext(self._environment, context.name)
        return context

    def _prepared(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with its reasoning under both names that templates read, and its content as configured."""
        content = message.get("content")
        if self._content_as_list and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if _REASONING_NAMES.isdisjoint(message):
            return message
        reasoning = next((message[name] for name in REASONING_NAMES if message.get(name) is not None), None)
        if reasoning is None:
            return message
        return {"thinking": reasoning, **message, "reasoning_content": reasoning}

    def missing_turn(self, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]], tools: Any) -> int | None:
        """Return the index of the first turn whose text the template leaves out; None if it renders all turns.

        Many templates silently skip later system prompts. Answers are not checked. Results are cached by turn shapes.
        """
        turn_shapes = [(turn.role, bool(turn.content.strip()), *sorted(turn.extra)) for turn in turns]
        cache_key = (bool(tools), *turn_shapes)
        if cache_key in self._missing_turns:
            return self._missing_turns[cache_key]
        missing = self._find_missing_turn(turns, messages, tools)
        if len(self._missing_turns) < _MAX_REMEMBERED:
            self._missing_turns[cache_key] = missing
        return missing

    def _find_missing_turn(
        self, turns: Sequence[Turn], messages: Sequence[Mapping[str, Any]], tools: Any
    ) -> int | None:
        """Find the first turn of a conversation whose text the chat template leaves out, such as a later system prompt.

        To find it, replace the text of each turn by a unique marker, render the conversation, and look for the markers.
        Assistant turns and turns without text are not checked.

        Args:
            messages: the same turns in the form that the template takes, one for each turn. They are not changed.
            tools: descriptions of the tools for the template.

        Returns:
            The index of the turn; None if no turn is missing or if the template fails on the markers.
        """
        marked_messages = list(messages)
        marker_by_turn: dict[int, str] = {}
        for index, turn in enumerate(turns):
            has_text = bool(turn.content.strip())
            if turn.role != "assistant" and has_text:
                marker = f"packtoolturn{index}end"
                marker_by_turn[index] = marker
                marked_messages[index] = _with_content(messages[index], marker)

        try:
            rendered = self.render(marked_messages, tools)
        except TemplateFailure:
            return None  # the caller has rendered the original texts without failure

        for index, marker in marker_by_turn.items():
            if marker not in rendered:
                return index
        return None


def _with_content(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a copy of a message with another text as content: a string, or a list of one item if it was a list."""
    if isinstance(message["content"], str):
        return {**message, "content": text}
    return {**message, "content": [{"type": "text", "text": text}]}


def template_variants(text: str, variables: Mapping[str, Any]) -> Iterator[ChatTemplate]:
    """Yield the template for contents that are texts, then for lists; nothing if it is not valid Jinja."""
    try:
        for as_list in (False, True):
            yield ChatTemplate(text, variables, content_as_list=as_list)
    except ConfigError:
        return


_QUESTION, _ANSWER = "packtoolquestion", "packtoolanswer"
_EXTENSION = (
    "{{%- if messages and messages[-1].role == 'assistant' and not add_generation_prompt -%}}"
    "{{{{- ({tool!r} if messages[-1].tool_calls else {user!r}) -}}}}{{%- endif -%}}"
)


def ended_template(text: str, variables: Mapping[str, Any], stops: Callable[[], Collection[str]]) -> tuple[str, str]:
    """Extend a chat template whose answers end only where the next turn opens, so that the last answer ends, too.

    Return the template, and the text that it adds after the last answer; unchanged and "" if answers need no end, or
    if generation does not stop where the next turn opens. ``stops`` returns the tokens that generation stops at.
    """
    for template in template_variants(text, variables):
        if user := _mark_between(template, "user", stops):
            tool = _mark_between(template, "tool", stops) or user
            return text + _EXTENSION.format(user=user, tool=tool), user
    return text, ""


def _mark_between(template: ChatTemplate, role: str, stops: Callable[[], Collection[str]]) -> str:
    """Return the text from an unended answer to the next message of a role, to the first stop token; "" for none."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    try:
        short = template.render(messages)
        long = template.render([*messages, {"role": role, "content": _QUESTION}])
    except TemplateFailure:
        return ""
    ending, continuation = short.partition(_ANSWER)[2], long.partition(_ANSWER)[2]
    if _ANSWER not in short or ending.strip() or not continuation.startswith(ending):
        return ""
    mark = continuation.removeprefix(ending)
    stop = next((stop for stop in stops() if mark.lstrip().startswith(stop)), None)
    return "" if stop is None else mark[: mark.index(stop) + len(stop)]


def strings_of(sample: Sample) -> list[str]:
    """Return every text of a sample that a template may print; RowProblem for NaN or infinity, which JSON lacks."""
    strings = [turn.content for turn in sample.turns]
    stack: list[object] = [turn.extra for turn in sample.turns if turn.extra]
    stack += [*(sample.tools or ()), *sample.chat_template_kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            strings.append(value)
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            stack += value
        elif isinstance(value, float) and not math.isfinite(value):
            raise RowProblem("invalid_content", f"tools or a tool call contain the number {value}")
    return strings
