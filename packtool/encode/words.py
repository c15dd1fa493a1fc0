"""Byte-level BPE word by word, with every word's tokens remembered.

A byte-level tokenizer cuts a text into words with one regular expression and then merges bytes inside each word, so
equal words have equal tokens. Cutting takes most of the time of the ``tokenizers`` library, which tracks the origin of
every character on the way, and merging most of the rest; looking words up in a dictionary costs a small part of that.
The tokens are the library's own: it is asked for every word once.

Only texts whose characters have had the same class in all versions of Unicode are taken, so that this module's regular
expressions and the library's cannot disagree; others, and other kinds of tokenizers, go the library's way.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

_MOST_WORDS = 1 << 20
_MANY_WORDS = 4096
_MOST_CHARS = 64
"""Longer words (base64, endless punctuation) are not remembered."""

_SAFE_RANGES = (
    *("\t\n\r", " -~", "\u00a1-\u00ff"),
    *("\u0391-\u03a1\u03a3-\u03c9", "\u0410-\u044f", "\u2010-\u2027\u2030-\u205e", "\u20ac"),
    *("\u2190-\u21ff", "\u2200-\u22ff", "\u2500-\u25ff", "\u2600-\u26ff", "\u2701-\u2767"),
    *("\u3000-\u3020", "\u3041-\u3094\u30a1-\u30fa", "\u4e00-\u9fa5", "\uac00-\ud7a3", "\uff01-\uff5e"),
    *("\U0001f300-\U0001f320", "\U0001f600-\U0001f64f"),
)
_UNSAFE = re.compile(f"[^{''.join(_SAFE_RANGES)}]")


class WordTokenizer:
    """Tokenizes plain text through a dictionary of words. Use ``of``, which knows where that is right.

    Args:
        tokenizer: the backend tokenizer, with ``encode_special_tokens`` set.
        pattern: its regular expression, which cuts a text into words.
        added: texts of added tokens that are found in plain text (``<think>``).
        normalized: whether text is brought to NFC first.
    """

    def __init__(self, tokenizer: Tokenizer, pattern: str, added: dict[str, int], normalized: bool) -> None:
        self._words = _Words(tokenizer)
        expression = re.compile(_translated(pattern, _safe_chars()))
        self._cut, self._iterate = expression.findall, expression.finditer
        self._added = added
        alternatives = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
        self._find_added = re.compile(f"({alternatives})") if added else None
        self._normalized = normalized

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordTokenizer | None:
        """One for a byte-level BPE tokenizer that cuts by a regular expression; None for any other kind."""
        pattern = _pattern(tokenizer)
        found_in_text = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if not token.special}
        if pattern is None or any(
            token.lstrip or token.rstrip or token.single_word for token in found_in_text.values()
        ):
            return None
        added = {token.content: i for i, token in found_in_text.items()}
        return cls(tokenizer, pattern, added, normalized=tokenizer.normalizer is not None)

    def num_words(self, text: str, enough: int) -> int:
        """Words of a text, each of which is a token or more; counting ends at ``enough``. 0 if it is not known."""
        if not self._is_safe(text) or (self._find_added is not None and self._find_added.search(text)):
            return 0
        return sum(1 for _ in islice(self._iterate(text), enough))

    def _is_safe(self, text: str) -> bool:
        is_ascii = text.isascii()
        # Most texts are ASCII with line breaks; looking for these only is several times as quick.
        if not (is_ascii and text.replace("\n", "").isprintable()) and _UNSAFE.search(text):
            return False
        return is_ascii or not self._normalized or unicodedata.is_normalized("NFC", text)

    def ends(self, text: str, num: int) -> tuple[list[int], int] | None:
        """The first and the last ``num`` ids of a long text, and how many lie between them, in little memory.

        Returns:
            None if the library must be asked.
        """
        if not self._is_safe(text):
            return None
        found = self._found_one_by_one(text)
        head: list[int] = []
        for of_word in found:
            head += of_word
            if len(head) >= num:
                break
        tail, behind = deque[int](maxlen=num), 0
        while some := list(islice(found, _MANY_WORDS)):
            ids = list(chain.from_iterable(some))
            tail.extend(ids)
            behind += len(ids)
        return [*head, *tail], behind - len(tail)

    def _found_one_by_one(self, text: str) -> Iterator[tuple[int, ...]]:
        parts = self._find_added.split(text) if self._find_added is not None else [text]
        for i, part in enumerate(parts):
            if i % 2:
                yield (self._added[part],)
            else:
                yield from map(self._words.__getitem__, map(re.Match.group, self._iterate(part)))

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text, or None if the library must be asked."""
        if not self._is_safe(text):
            return None
        cut, look_up = self._cut, self._words.__getitem__
        if self._find_added is None or not self._find_added.search(text):
            return list(chain.from_iterable(map(look_up, cut(text))))
        ids: list[int] = []
        for i, part in enumerate(self._find_added.split(text)):
            if i % 2:
                ids.append(self._added[part])
            else:
                ids += chain.from_iterable(map(look_up, cut(part)))
        return ids


class _Words(dict[str, tuple[int, ...]]):
    """Tokens by word; the library is asked for those that are new."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = tuple(self._tokenizer.encode_batch_fast([word], add_special_tokens=False)[0].ids)
        if len(self) < _MOST_WORDS and len(word) <= _MOST_CHARS:
            self[word] = ids
        return ids


def _pattern(tokenizer: Tokenizer) -> str | None:
    """The regular expression that cuts words, if that and bytes is all there is to it."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizer, cutter = component_settings(tokenizer.normalizer), component_settings(tokenizer.pre_tokenizer)
    steps = cutter.get("pretokenizers", ())
    if normalizer.get("type", "NFC") != "NFC" or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = steps
    if byte_level["add_prefix_space"] or byte_level["use_regex"] or split["invert"] or split["behavior"] != "Isolated":
        return None
    pattern = split["pattern"].get("Regex")
    return pattern if isinstance(pattern, str) and _is_understood(pattern) else None


def component_settings(component: Any) -> dict[str, Any]:
    """A normalizer's or pre-tokenizer's settings; nothing for none, or for one written in Python."""
    if component is None:
        return {}
    try:
        return dict(json.loads(component.__getstate__()))
    except Exception:  # whatever the library raises for what it cannot write down
        return {"type": "unknown"}


@cache
def _safe_chars() -> str:
    return _UNSAFE.sub("", "".join(map(chr, range(0x20000))))


@cache
def _translated(pattern: str, chars: str) -> str:
    """The expression with ``\\p{L}``, ``\\p{N}`` and ``\\s`` spelled out for texts of some characters only.

    Python's ``re`` knows no Unicode categories, but is twice as fast as the ``regex`` module, which does.
    """
    by_category: dict[str, list[str]] = {}
    for char in chars:
        by_category.setdefault(unicodedata.category(char)[0], []).append(char)
    members = {
        r"\p{L}": _as_ranges(by_category["L"]),
        r"\p{N}": _as_ranges(by_category["N"]),
        r"\s": _as_ranges(filter(str.isspace, chars)),
    }
    result, in_class = [], False
    for token in re.findall(r"\\p\{[LN]\}|\\.|.", pattern, re.DOTALL):
        if token in "[]":
            in_class = token == "["
        if token == r"\S":
            token = f"[^{members[chr(92) + 's']}]"
        elif token in members:
            token = members[token] if in_class else f"[{members[token]}]"
        result.append(token)
    return "".join(result)


def _as_ranges(chars: Iterable[str]) -> str:
    """Characters, ascending, as the inside of a character class."""
    ranges: list[tuple[int, int]] = []
    for code in map(ord, chars):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = ranges[-1][0], code
        else:
            ranges.append((code, code))
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def _is_understood(pattern: str) -> bool:
    """Whether both engines mean the same by it: letters, numbers, blanks, groups, and no look-behind."""
    rest = re.sub(r"\\p\{[LN]\}|\\[srnS]|\(\?[i!]?:?|\{\d+(,\d+)?\}|[\[\]()^|?*+']", "", pattern)
    return re.fullmatch(r"[A-Za-z .:!]*", rest) is not None and not re.search(r"\[[^\]]*\\S", pattern)
