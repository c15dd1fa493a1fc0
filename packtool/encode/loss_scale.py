"""Target tokens and their weights: ``--loss-scale``.

A loss scale is a base, optionally followed by rules, as in ``last_round+ignore_empty_think``:

    default      every assistant turn
    last_round   the last assistant turn only
    all          every token outside media

Rules change the weights of parts of an assistant's text; 0 means not trained. The matches of a *pattern*, a regular
expression, get its weight. A *keyword* has two weights: its own, and that of the text up to the next keyword of the
same rule. Names and weights are those that ms-swift documents. A rule without a base applies to ``default``. A
message's own ``loss`` (true or false) replaces all this for its turn, except that empty thinking blocks are never
trained; its ``loss_scale`` multiplies the weights.

Models with *hybrid thinking* (Qwen3, Qwen3.5, DeepSeek-V3.1) begin an answer without thinking with an empty thinking
block. When thinking is switched off, the generation prompt contains this block, so the model never predicts it.
``ignore_empty_think`` is therefore added to every loss scale of such a model, as in ms-swift since 4.3.1, unless
``keep_empty_think`` is among its rules.

``train_newline`` also trains the line break that ChatML templates write after ``<|im_end|>``, as ms-swift and
LLaMA-Factory do. The model never has to predict it, because generation stops before.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from packtool.constants import TRAIN_NEWLINE
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
    "qwen": {"✿FUNCTION✿:": (2.0, 2.0), "✿ARGS✿:": (2.0, 2.0), "✿RETURN✿:": (1.0, 1.0), "✿RESULT✿:": (2.0, 0.0)},
    "agentflan": {**_REACT, **dict.fromkeys(_TOOL_NAMES, (1.0, 3.0))},
}
# The longest first, for "Action Input:" must not match "Action".
_KEYWORD_PATTERNS = {
    rule: re.compile("|".join(map(re.escape, sorted(keywords, key=len, reverse=True))))
    for rule, keywords in _KEYWORDS.items()
}
# The opening mark is missing where the generation prompt contains it. Gemma 4 and MiniMax have other marks.
EMPTY_THINKING = r"\s*(?:(?:<think>)?\s*</think>|<\|channel>thought\n<channel\|>|</mm:think>)\s*"
"""An empty thinking block, as a regular expression."""
KEEP_EMPTY_THINK = "keep_empty_think"
"""The rule that trains empty thinking blocks."""
_IGNORE = "ignore_empty_think"
_PATTERNS: dict[str, dict[str, float]] = {
    "hermes": {r"<tool_call>.+?</tool_call>": 2.0},
    _IGNORE: {rf"\A{EMPTY_THINKING}": 0.0},
    KEEP_EMPTY_THINK: {},
    TRAIN_NEWLINE: {},
    "ignore_think_prefix": {r"\A\s*<think>\n?": 0.0},
}
_ALIASES = {"last_round_with_ignore_empty_think": "last_round+ignore_empty_think"}


class LossScale(NamedTuple):
    """A parsed loss scale: its base, and its rules in order."""

    base: Base
    rules: tuple[str, ...]

    def text_weights(self, text: str) -> Weights:
        """Return the weight of each character, float32 (len(text),): the product of those of all rules."""
        weights = np.ones(len(text), np.float32)
        for rule in self.rules:
            matches = list(_KEYWORD_PATTERNS[rule].finditer(text)) if rule in _KEYWORDS else []
            for match, next_match in zip_longest(matches, matches[1:]):
                keyword_weight, following_weight = _KEYWORDS[rule][match.group()]
                weights[match.start() : match.end()] *= keyword_weight
                weights[match.end() : next_match.start() if next_match else len(text)] *= following_weight
            for pattern, weight in _PATTERNS.get(rule, {}).items():
                for match in re.finditer(pattern, text, re.DOTALL):
                    weights[match.start() : match.end()] *= weight
        return weights

    @property
    def of_marked_turns(self) -> LossScale:
        """Loss scale with only the rules that apply to turns with ``loss: true`` in their row."""
        return LossScale(self.base, tuple(rule for rule in self.rules if rule in (_IGNORE, TRAIN_NEWLINE)))


@lru_cache(maxsize=64)
def parse_loss_scale(text: str) -> LossScale:
    """Parse a loss scale such as ``last_round+ignore_empty_think``; ConfigError for unknown or conflicting rules."""
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
    """Append ``+ignore_empty_think`` for hybrid thinking, unless a rule about empty thinking blocks is there."""
    rules = parse_loss_scale(text).rules
    return text if not is_hybrid_thinking or _IGNORE in rules or KEEP_EMPTY_THINK in rules else f"{text}+{_IGNORE}"
