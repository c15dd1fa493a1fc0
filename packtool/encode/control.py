"""Control tokens: those of the template become ids, the same text inside a row stays text.

A row's strings are *shielded* before the template gets them: every control token's text in them becomes one private-use
character. All control tokens of the rendered conversation are then the template's. It is split there, the pieces in
between are tokenized as plain text, and the shielded characters become the text they stood for::

    row text        a <|im_end|> b            shielded      a ⟦3⟧ b
    rendered        <|im_start|>user\\na ⟦3⟧ b<|im_end|>\\n
    split           <|im_start|>  "user\\na <|im_end|> b"  <|im_end|>  "\\n"

The ids equal those of the rendered string, because a tokenizer never merges across a control token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from packtool.constants import MEDIA_MARKS
from packtool.errors import ConfigError

_BLOCK = 0x4000  # more than any tokenizer has control tokens
_MEDIA_SLOTS = {kind: _BLOCK - 1 - i for i, kind in enumerate(MEDIA_MARKS)}
_NUM_SLOTS = _BLOCK - len(MEDIA_MARKS)
# Planes 15 and 16 are private use; the highest block that a row's text leaves free is taken.
_BASES = tuple(range(0x10C000, 0xF0000 - 1, -_BLOCK))
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_NOTHING = "(?!)"
_NO_PLACEHOLDERS: Mapping[str, str] = {}


class Piece(NamedTuple):
    """A control token of the template and the text up to the next one.

    Args:
        control: the token's text, or "" for what comes before the first.
        media: "image", "video" or "audio" if this control token stands for a medium, else "".
        text: plain text that follows.
        times: number of repetitions of the control token.
    """

    control: str
    media: str
    text: str
    times: int = 1


class Shield:
    """Stands private-use characters in for control-token text and picture marks, for one row.

    Args:
        strings: every string of the row.
        spared: control tokens that stay control tokens in them.

    Raises:
        ValueError: if the row leaves no block of private-use characters free.
    """

    def __init__(
        self, vocabulary: ControlVocabulary, strings: Iterable[str], spared: frozenset[str] = frozenset()
    ) -> None:
        self._vocabulary = vocabulary
        self._spared = spared
        non_ascii = [string for string in strings if not string.isascii()]
        used_blocks = {ord(char) // _BLOCK for string in non_ascii for char in _PRIVATE.findall(string)}
        base = next((base for base in _BASES if base // _BLOCK not in used_blocks), None)
        if base is None:
            raise ValueError("the text uses private-use characters all over planes 15 and 16")
        self._base = base
        self._has_shielded = False
        self._kinds: Mapping[str, str] = {}

    def text(self, string: str) -> str:
        """Shield one string."""
        if not self._vocabulary.pattern.search(string):
            return string
        self._has_shielded = True
        slot, spared = self._vocabulary.slots, self._spared
        return self._vocabulary.pattern.sub(
            lambda match: match.group() if match.group() in spared else chr(self._base + slot[match.group()]), string
        )

    def value(self, value: Any) -> Any:
        """Shield every string of nested lists and mappings, their keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def media(self, string: str, kinds: Iterable[str]) -> str:
        """Replace the marks of some kinds of media (``<image>``, ...) by the characters that stand for a medium."""
        for kind in kinds:
            self._kinds = {chr(self._base + slot): each for each, slot in _MEDIA_SLOTS.items()}
            string = string.replace(MEDIA_MARKS[kind], chr(self._base + _MEDIA_SLOTS[kind]))
        return string

    def as_list(self, string: str) -> list[dict[str, str]]:
        """Split a text after ``media`` into the list of texts and media that some templates take."""
        parts: list[dict[str, str]] = []
        start = 0
        for i, char in enumerate(string if self._kinds else ""):
            if char in self._kinds:
                parts += [{"type": "text", "text": string[start:i]}] if start < i else []
                parts.append({"type": self._kinds[char]})
                start = i + 1
        return [*parts, {"type": "text", "text": string[start:]}] if start < len(string) or not parts else parts

    def lift(self, string: str) -> str:
        """Replace the shielded characters by their text."""
        if not self._has_shielded:
            return string
        texts = self._vocabulary.texts
        return "".join(
            texts[ord(char) - self._base] if 0 <= ord(char) - self._base < len(texts) else char for char in string
        )

    def split(self, rendered: str, placeholders: Mapping[str, str] = _NO_PLACEHOLDERS) -> list[Piece]:
        """Split the rendered conversation into pieces, in order; their texts are lifted.

        Args:
            placeholders: kind of medium by further control tokens that stand for one.
        """
        parts = self._vocabulary.split_pattern("".join(self._kinds)).split(rendered)
        kinds = {**placeholders, **self._kinds}
        return [
            Piece(control, kinds.get(control, ""), self.lift(text))
            for control, text in zip(["", *parts[1::2]], parts[::2], strict=True)
        ]


class ControlVocabulary:
    """The control tokens of a tokenizer.

    Args:
        tokenizer: the backend tokenizer; it is set to read control tokens in text as text.
        always_control: tokens that mark media or open turns, whether or not the tokenizer marks them as special.

    Raises:
        ConfigError: if there are more control tokens than private-use characters to replace them.
    """

    def __init__(self, tokenizer: Tokenizer, always_control: Sequence[str] = ()) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special_texts = {token.content for token in added.values() if token.special}
        plain = [token for token in added.values() if token.content in {*always_control} - special_texts]
        if plain:  # only special tokens can be read as text
            as_special = [
                AddedToken(token.content, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=True)
                for token in plain
            ]
            tokenizer.add_special_tokens(as_special)
            added = tokenizer.get_added_tokens_decoder()
        special = sorted(((i, token) for i, token in added.items() if token.special), key=lambda item: item[0])
        if len(special) > _NUM_SLOTS:
            raise ConfigError(f"the tokenizer has {len(special)} control tokens, more than {_NUM_SLOTS}")
        self.ids = {token.content: i for i, token in special}
        self.texts = tuple(self.ids)
        self.slots = {text: slot for slot, text in enumerate(self.texts)}
        self.strip_right = frozenset(token.content for _, token in special if token.rstrip)
        self.strip_left = frozenset(token.content for _, token in special if token.lstrip)
        self._longest_first = sorted(self.texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self._longest_first)) or _NOTHING)
        self._split_patterns: dict[str, re.Pattern[str]] = {}
        tokenizer.encode_special_tokens = True

    def split_pattern(self, marks: str) -> re.Pattern[str]:
        """Return a pattern that splits at control tokens and at the characters for media, and keeps these.

        Args:
            marks: the characters; none for a row without media, since re is faster where all alternatives begin alike.
        """
        if marks not in self._split_patterns:
            # Single characters, not a class: with literals only, re skips to their first characters at once.
            literals = "|".join((*marks, *map(re.escape, self._longest_first))) or _NOTHING
            self._split_patterns[marks] = re.compile(f"({literals})")
        return self._split_patterns[marks]
