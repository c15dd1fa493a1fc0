"""Templates that end no answer: what the model stops at is put behind the last one.

GLM's turns end where the next one opens, and what opens it is among the tokens that generation stops at
(``generation_config.json``)::

    <|user|>Why?<|assistant|>So.<|user|>And?<|assistant|>Thus.              as the template writes it
    <|user|>Why?<|assistant|>So.<|user|>And?<|assistant|>Thus.<|user|>      with it

So ``<|user|>`` is what an answer is trained to end with, as in ms-swift and TRL [read in both]. That
``<|observation|>`` is what tool calls end with follows from the template and from what generation stops at alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from packtool.encode.template import ChatTemplate, TemplateFailure
from packtool.errors import ConfigError

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
