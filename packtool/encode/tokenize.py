"""Plain text between two control tokens becomes ids.

Byte-level BPE word by word, with every word's tokens remembered.

A byte-level tokenizer cuts a text into words with one regular expression and then merges bytes inside each word, so
equal words have equal tokens. Cutting takes most of the time of the ``tokenizers`` library, which tracks the origin of
every character on the way, and merging most of the rest; looking words up in a dictionary costs a small part of that.
The tokens are the library's own: it is asked for every word once.

Only texts whose characters have had the same class in all versions of Unicode are taken, so that this module's regular
expressions and the library's cannot disagree; others, and other kinds of tokenizers, go the library's way.

How many tokens a text has at least, told from its characters and words alone.

A text that cannot fit is known for one before it is tokenized, which takes a hundred times its size in memory: no token
is longer than the vocabulary's longest, and no token crosses the border of two words. Both hold for tokenizers that
lose nothing of a text: byte-level BPE, and BPE that falls back to bytes. For others nothing is promised.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from itertools import chain, islice
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from packtool.encode.control import ControlVocabulary, Piece

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


# Characters that one character in normal form (NFC) can stand for: none decomposes into more.
_MOST_COMPOSED = 4
_CUTTERS = ("Split", "ByteLevel", "Digits")


class LeastTokens:
    """Lower bounds on the number of tokens of texts.

    Args:
        tokenizer: the backend tokenizer.
        words: cuts its words, if that is known.
    """

    def __init__(self, tokenizer: Tokenizer, words: WordTokenizer | None) -> None:
        self._tokenizer, self._words = tokenizer, words

    def of(self, text: str, enough: int) -> int:
        """A number of tokens that a text has at least; counting ends at ``enough``."""
        if not text or not self._longest:
            return 0
        num_chars = len(text)
        if not text.isascii() and self._composes and not unicodedata.is_normalized("NFC", text):
            num_chars = -(-num_chars // _MOST_COMPOSED)
        least = -(-num_chars // self._longest)
        if least < enough and self._words is not None:
            least = max(least, self._words.num_words(text, enough))
        return least

    @cached_property
    def _composes(self) -> bool:
        return bool(component_settings(self._tokenizer.normalizer))

    @cached_property
    def _longest(self) -> int:
        """Characters that one token can stand for; 0 if the tokenizer may lose some."""
        tokenizer = self._tokenizer
        added = tokenizer.get_added_tokens_decoder().values()
        if not _keeps_all(tokenizer) or any(not token.special and (token.lstrip or token.rstrip) for token in added):
            return 0
        return max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)


def _keeps_all(tokenizer: Tokenizer) -> bool:
    model, normalizer = tokenizer.model, component_settings(tokenizer.normalizer)
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    cutter = component_settings(tokenizer.pre_tokenizer)
    steps = cutter.get("pretokenizers", [cutter] if cutter else [])
    if any(step["type"] == "ByteLevel" for step in steps):
        known = all(step["type"] in _CUTTERS and step.get("behavior") != "Removed" for step in steps)
        return known and normalizer.get("type", "NFC") == "NFC"
    normalizers = normalizer.get("normalizers", [normalizer] if normalizer else [])
    return bool(model.byte_fallback) and not steps and all(map(_keeps_length, normalizers))


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """Llama's and Gemma's: a mark for each blank, and perhaps one more before the text."""
    if normalizer["type"] == "Prepend":
        return True
    return normalizer["type"] == "Replace" and json.dumps(normalizer["pattern"]) == json.dumps({"String": " "})


# Short pieces (a newline, a role) come back in every turn of every row.
_REMEMBERED_CHARS = 64
_REMEMBERED_PIECES = 100_000
_PROBES = ("user\nHello, world", "\n", " a  b\n\nc", "1 + 1 = 2. 你好")


class PieceTokenizer:
    """Tokenizes pieces so that the whole equals the tokenization of the whole string.

    Most tokenizers (all byte-level BPE ones) give a piece the same ids wherever it stands. Some SentencePiece ones
    put a space before the first piece only; for these a piece is encoded behind its control token. Which kind it is,
    is found out once.

    Args:
        tokenizer: the backend tokenizer, with ``encode_special_tokens`` set.
        vocabulary: its control tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: ControlVocabulary) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._words = WordTokenizer.of(tokenizer)
        self._least = LeastTokens(tokenizer, self._words)
        self._remembered: dict[str, list[int]] = {}
        self.context_free = self._is_context_free()

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Ids of each piece's text, without the control token before it."""
        if not self.context_free:
            return [self._encode_behind(piece) for piece in pieces]
        if self._vocabulary.strip_left or self._vocabulary.strip_right:
            texts = [self._trimmed(pieces, i) for i in range(len(pieces))]
        else:
            texts = [piece.text for piece in pieces]
        fresh = list(dict.fromkeys(text for text in texts if text and text not in self._remembered))
        found: dict[str, list[int]] = {"": []}
        if self._words is not None:
            by_words = {text: self._words.encode(text) for text in fresh}
            found |= {text: ids for text, ids in by_words.items() if ids is not None}
            fresh = [text for text, ids in by_words.items() if ids is None]
        if fresh:
            encodings = self._tokenizer.encode_batch_fast(fresh, add_special_tokens=False)
            found.update(zip(fresh, (encoding.ids for encoding in encodings), strict=True))
        result = [found[text] if text in found else self._remembered[text] for text in texts]
        if len(self._remembered) < _REMEMBERED_PIECES:
            self._remembered.update({text: ids for text, ids in found.items() if len(text) <= _REMEMBERED_CHARS})
        return result

    def least(self, pieces: Sequence[Piece], enough: int) -> int:
        """A number of tokens that the texts of pieces have at least; counting ends at ``enough``."""
        least = 0
        if self.context_free:
            for i in range(len(pieces)):
                least += self._least.of(self._trimmed(pieces, i), enough - least)
                if least >= enough:
                    break
        return least

    def ends(self, pieces: Sequence[Piece], i: int, num: int) -> tuple[list[int], int] | None:
        """The first and the last ids of a long piece's text, ``num`` and perhaps some more, and how many lie between.

        Returns:
            None where only tokenizing the whole text tells them.
        """
        if self._words is None or not self.context_free:
            return None
        return self._words.ends(self._trimmed(pieces, i), num)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Characters [start, end) of each token of one piece's text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def _trimmed(self, pieces: Sequence[Piece], i: int) -> str:
        """A piece's text, without the blanks that the control tokens around it swallow."""
        text = pieces[i].text
        if pieces[i].control in self._vocabulary.strip_right:
            text = text.lstrip()
        if i + 1 < len(pieces) and pieces[i + 1].control in self._vocabulary.strip_left:
            text = text.rstrip()
        return text

    def _is_context_free(self) -> bool:
        usable = [text for text in self._vocabulary.texts if text not in self._vocabulary.strip_right]
        if not usable:
            return True
        return all(self._encode_behind(Piece(usable[0], "", probe)) == self._plain(probe) for probe in _PROBES)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_behind(self, piece: Piece) -> list[int]:
        """Ids of a piece's text as they are behind its control token."""
        if piece.control not in self._vocabulary.ids or self._vocabulary.pattern.search(piece.text):
            # A newline stands in for the control token where reading those is switched off.
            newline = self._plain("\n")
            ids = self._plain("\n" + piece.text)
            return ids[len(newline) :] if piece.control and ids[: len(newline)] == newline else self._plain(piece.text)
        self._tokenizer.encode_special_tokens = False
        try:
            return self._plain(piece.control + piece.text)[1:]
        finally:
            self._tokenizer.encode_special_tokens = True
