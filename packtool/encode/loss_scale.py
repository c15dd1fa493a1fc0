"""Target tokens and their weights: ``--loss-scale``.

A loss scale is a base and perhaps further rules after it, as in ``last_round+ignore_empty_think``:

    default      every assistant turn
    last_round   the last assistant turn only
    all          every token that is not a medium's

Rules give parts of an assistant's text other weights; 0 means not trained. A *pattern* is a regular expression, and
its matches get the weight. A *keyword* has two weights: its own, and that of the text after it up to the next
keyword of the same rule. Names and weights are those that ms-swift documents; a rule alone applies to ``default``. A
row's own ``loss`` of a message (true or false) replaces all this for that turn, except that an empty thinking block
stays out of the loss; its ``loss_scale`` multiplies the weights.

Models for *hybrid thinking* (Qwen3, Qwen3.5, DeepSeek-V3.1) open an answer without thoughts with an empty thinking
block. Their generation prompt writes it when thinking is switched off, so the model never has to predict it. Like
ms-swift from 4.3.1 on, ``ignore_empty_think`` is therefore added to every loss scale of such a model, unless
``keep_empty_think`` is among its rules.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError, did_you_mean

Base = Literal["default", "last_round", "all"]
Weights = npt.NDArray[np.float32]

BASES: tuple[Base, ...] = ("default", "last_round", "all")

_REACT = {
    "Action:": (2.0, 2.0),
    "Action Input:": (2.0, 2.0),
    "Thought:": (1.0, 1.0),
    "Final Answer:": (1.0, 1.0),
    "Observation:": (2.0, 0.0),
}
_TOOL_NAMES = ("Name:", "Action:", "ACTION:", "Tool:", "Command", "Arguments:", "action input", "ACTION_INPUT:")
_KEYWORDS: dict[str, dict[str, tuple[float, float]]] = {
    "react": _REACT,
    "alpha_umi": {**_REACT, "Next:": (2.0, 2.0)},
    "qwen": {
        "✿FUNCTION✿:": (2.0, 2.0),
        "✿ARGS✿:": (2.0, 2.0),
        "✿RETURN✿:": (1.0, 1.0),
        "✿RESULT✿:": (2.0, 0.0),
    },
    "agentflan": {**_REACT, **dict.fromkeys(_TOOL_NAMES, (1.0, 3.0))},
}
# The longest first, for "Action Input:" must not match "Action".
_KEYWORD_PATTERNS = {
    rule: re.compile("|".join(map(re.escape, sorted(keywords, key=len, reverse=True))))
    for rule, keywords in _KEYWORDS.items()
}
# Without the opening mark where the generation prompt has it. Gemma 4 and MiniMax have other marks.
EMPTY_THINKING = r"\s*(?:(?:<think>)?\s*</think>|<\|channel>thought\n<channel\|>|</mm:think>)\s*"
"""An empty thinking block, as a regular expression."""
KEEP_EMPTY_THINK = "keep_empty_think"
"""The rule with which empty thinking blocks are trained, too."""
_IGNORE = "ignore_empty_think"
_PATTERNS: dict[str, dict[str, float]] = {
    "hermes": {r"<tool_call>.+?</tool_call>": 2.0},
    _IGNORE: {rf"\A{EMPTY_THINKING}": 0.0},
    KEEP_EMPTY_THINK: {},
    "ignore_think_prefix": {r"\A\s*<think>\n?": 0.0},
}
_ALIASES = {"last_round_with_ignore_empty_think": "last_round+ignore_empty_think"}


class LossScale(NamedTuple):
    """A base and the rules after it."""

    base: Base
    rules: tuple[str, ...]

    def text_weights(self, text: str) -> Weights:
        """Return the weight of each character of an assistant's text, (len(text),); several rules multiply."""
        weights = np.ones(len(text), np.float32)
        for rule in self.rules:
            matches = list(_KEYWORD_PATTERNS[rule].finditer(text)) if rule in _KEYWORDS else []
            for match, following in zip_longest(matches, matches[1:]):
                own, after = _KEYWORDS[rule][match.group()]
                weights[match.start() : match.end()] *= own
                weights[match.end() : following.start() if following else len(text)] *= after
            for pattern, weight in _PATTERNS.get(rule, {}).items():
                for match in re.finditer(pattern, text, re.DOTALL):
                    weights[match.start() : match.end()] *= weight
        return weights

    @property
    def of_marked_turns(self) -> LossScale:
        """The rules that still apply to a turn that its row's ``loss: true`` makes a target."""
        return LossScale(self.base, tuple(rule for rule in self.rules if rule == _IGNORE))


@lru_cache(maxsize=64)
def parse_loss_scale(text: str) -> LossScale:
    """Parse ``default``, ``react``, ``last_round+ignore_empty_think``, ...

    Raises:
        ConfigError: naming the unknown rule, and the known ones.
    """
    names = [name.strip() for name in _ALIASES.get(text, text).split("+")]
    known = (*BASES, *_KEYWORDS, *_PATTERNS)
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"loss scale {text!r}: {name!r} is none of {', '.join(known)}{hint}")
    bases = [base for base in BASES if base in names]
    if len(bases) > 1:
        raise ConfigError(f"loss scale {text!r}: {bases[0]} and {bases[1]} exclude each other")
    if _IGNORE in names and KEEP_EMPTY_THINK in names:
        raise ConfigError(f"loss scale {text!r}: {_IGNORE} and {KEEP_EMPTY_THINK} exclude each other")
    return LossScale(bases[0] if bases else "default", tuple(name for name in names if name not in BASES))


def loss_scale_of(text: str, is_hybrid_thinking: bool) -> str:
    """Return the loss scale that applies for a requested one.

    That is ``text``, with ``+ignore_empty_think`` after it if the chat template is one for hybrid thinking and the text
    has no rule about empty thinking blocks.
    """
    rules = parse_loss_scale(text).rules
    return text if not is_hybrid_thinking or _IGNORE in rules or KEEP_EMPTY_THINK in rules else f"{text}+{_IGNORE}"
