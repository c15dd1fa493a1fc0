"""Which tokens are trained, and how much each counts: ``--loss-scale``.

A loss scale is a base and perhaps further rules behind it, as in ``last_round+ignore_empty_think``:

    default      every assistant turn
    last_round   the last assistant turn only
    all          every token that is not a medium's

Rules give parts of an assistant's text other weights; 0 means not trained. A *pattern* is a regular expression, and
what it matches gets the weight. A *keyword* has two weights: its own, and that of the text behind it up to the next
keyword of the same rule. Names and weights are those that ms-swift documents; a rule alone stands on ``default``. A
row's own ``loss`` of a message (true or false) replaces all this for that turn, and its ``loss_scale`` multiplies it.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from packtool.errors import ConfigError

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
_PATTERNS: dict[str, dict[str, float]] = {
    "hermes": {r"<tool_call>.+?</tool_call>": 2.0},
    "ignore_empty_think": {r"<think>\s*</think>\s*": 0.0},
    "ignore_think_prefix": {r"\A\s*<think>\n?": 0.0},
}
_ALIASES = {"last_round_with_ignore_empty_think": "last_round+ignore_empty_think"}


@dataclass(frozen=True)
class LossScale:
    """A base and the rules behind it."""

    base: Base
    rules: tuple[str, ...]

    def text_weights(self, text: str) -> Weights:
        """Weight of each character of an assistant's text, (len(text),); several rules multiply."""
        weights = np.ones(len(text), np.float32)
        for rule in self.rules:
            if rule in _KEYWORDS:
                weights *= _keyword_weights(text, rule)
                continue
            for pattern, weight in _PATTERNS[rule].items():
                for match in re.finditer(pattern, text, re.DOTALL):
                    weights[match.start() : match.end()] *= weight
        return weights


@lru_cache(maxsize=64)
def parse_loss_scale(text: str) -> LossScale:
    """Read ``default``, ``react``, ``last_round+ignore_empty_think``, ...

    Raises:
        ConfigError: naming what is not known, and what is.
    """
    names = [name.strip() for name in _ALIASES.get(text, text).split("+")]
    known = (*BASES, *_KEYWORDS, *_PATTERNS)
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"loss scale {text!r}: {name!r} is none of {', '.join(known)}{hint}")
    bases = [base for base in BASES if base in names]
    if len(bases) > 1:
        raise ConfigError(f"loss scale {text!r}: {bases[0]} and {bases[1]} exclude each other")
    return LossScale(bases[0] if bases else "default", tuple(name for name in names if name not in BASES))


def _keyword_weights(text: str, rule: str) -> Weights:
    weights = np.ones(len(text), np.float32)
    found = list(_keyword_pattern(rule).finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends, strict=True):
        own, behind = _KEYWORDS[rule][match.group()]
        weights[match.start() : match.end()] = own
        weights[match.end() : end] = behind
    return weights


@lru_cache(maxsize=16)
def _keyword_pattern(rule: str) -> re.Pattern[str]:
    # The longest first: "Action Input:" is not "Action" with something behind it.
    return re.compile("|".join(map(re.escape, sorted(_KEYWORDS[rule], key=len, reverse=True))))
