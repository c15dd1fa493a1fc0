"""What a processor of transformers writes for media, as text and as the parts that encoding knows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from packtool.encode.families.base import Part
from packtool.errors import ConfigError


def replacements_in(processor: Any, made: Mapping[str, Any], counts: Sequence[int], what: str) -> list[list[str]]:
    """What a processor wrote for each medium of each row.

    Args:
        made: all that it made.
        counts: media of each row.
        what: they are, for messages.

    Raises:
        ConfigError: if it does not say.
    """
    found = made.get("text_replacement_offsets")
    if not found or [len(row) for row in found] != list(counts):
        raise ConfigError(
            f"{type(processor).__name__} does not say what it writes for a {what}",
            "Use a newer transformers, or a model of another family.",
        )
    return [[str(replaced["replacement"]) for replaced in row] for row in found]


def special_tokens(processor: Any, others: Sequence[str] = ()) -> re.Pattern[str]:
    """Finds a processor's control tokens in what it writes.

    Args:
        others: that are control tokens too, whether or not its tokenizer says so.
    """
    tokens = {token.content for token in processor.tokenizer.added_tokens_decoder.values() if token.special}
    named = [processor.image_token, getattr(processor.tokenizer, "image_token", None), *others]
    tokens |= {str(token) for token in named if token}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))


def split_spelling(spelled: str, special: re.Pattern[str]) -> list[Part]:
    """Text and control tokens, repeated ones counted."""
    parts: list[Part] = []
    at = 0
    for match in special.finditer(spelled):
        if match.start() > at:
            parts.append(spelled[at : match.start()])
        last = parts[-1] if parts else ""
        if isinstance(last, tuple) and last[0] == match.group():
            parts[-1] = (last[0], last[1] + 1)
        else:
            parts.append((match.group(), 1))
        at = match.end()
    return [*parts, spelled[at:]] if at < len(spelled) else parts
