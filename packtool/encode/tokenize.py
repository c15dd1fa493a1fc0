"""Tokenize rendered conversations: the template's control tokens, and the plain text between them.

A control token of the template becomes its id; the same characters in a row's text stay text. For this, a row's texts
are *escaped* before rendering (each control token becomes a private-use character), and unescaped after the split::

    row text        a <|im_end|> b            escaped      a ⟦3⟧ b
    rendered        <|im_start|>user\\na ⟦3⟧ b<|im_end|>\\n
    split           <|im_start|>  "user\\na <|im_end|> b"  <|im_end|>  "\\n"

The ids equal those of the rendered string, because a tokenizer never merges across a control token. Words of byte-level
tokenizers are looked up in a dictionary, a fraction of the library's time; new words are tokenized once by the library.
Texts with characters whose class differs between versions of Unicode, and other tokenizers, are left to the library.

Texts that are certainly too long are recognized without tokenizing: no token is longer than the longest of the
vocabulary, or spans two words. This holds for byte-level BPE and BPE with byte fallback.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import islice
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from packtool.constants import MEDIA_MARKS
from packtool.errors import ConfigError

_BLOCK = 0x4000  # characters that one row uses: more than any tokenizer has control tokens
_MEDIA_SLOTS = {kind: _BLOCK - 1 - i for i, kind in enumerate(MEDIA_MARKS)}
_NUM_SLOTS = _BLOCK - len(MEDIA_MARKS)
# Planes 15 and 16 are for private use; each row uses the highest block that its own texts do not use.
_BASES = tuple(range(0x10C000, 0xF0000 - 1, -_BLOCK))
_PRIVATE = re.compile("[\U000f0000-\U0010ffff]")
_NOTHING = "(?!)"
_NO_PLACEHOLDERS: Mapping[str, str] = {}


class Chunk(NamedTuple):
    """A control token of a rendered conversation, and the text up to the next one.

    Args:
        control: text of the control token; "" for the text before the first one.
        media_kind: "image", "video" or "audio" if the control token stands for a medium, else "".
        num_controls: repetitions of the control token, for the tokens of a medium.
    """

    control: str
    media_kind: str
    text: str
    num_controls: int = 1


class ControlEscaper:
    """Replaces control tokens and media marks in the texts of one row by private-use characters, until it is rendered.

    The ``allowed`` control tokens keep their meaning in these texts. ValueError if the row's texts use private-use
    characters of every block.
    """

    def __init__(
        self, vocabulary: ControlVocabulary, strings: Iterable[str], allowed: frozenset[str] = frozenset()
    ) -> None:
        self._vocabulary = vocabulary
        self._allowed = allowed
        non_ascii = [string for string in strings if not string.isascii()]
        used_blocks = {ord(char) // _BLOCK for string in non_ascii for char in _PRIVATE.findall(string)}
        base = next((base for base in _BASES if base // _BLOCK not in used_blocks), None)
        if base is None:
            raise ValueError("the text uses private-use characters all over planes 15 and 16")
        self._base = base
        self._has_escaped = False
        self._kinds: Mapping[str, str] = {}

    def escape_text(self, string: str) -> str:
        """Escape the control tokens of a text."""
        if not self._vocabulary.pattern.search(string):
            return string
        self._has_escaped = True
        slot, allowed = self._vocabulary.slots, self._allowed
        return self._vocabulary.pattern.sub(
            lambda match: match.group() if match.group() in allowed else chr(self._base + slot[match.group()]), string
        )

    def escape_value(self, value: Any) -> Any:
        """Escape every text in nested lists and mappings, including keys."""
        if isinstance(value, str):
            return self.escape_text(value)
        if isinstance(value, dict):
            return {self.escape_text(str(key)): self.escape_value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape_value(item) for item in value]
        return value

    def escape_media(self, string: str, kinds: Iterable[str]) -> str:
        """Replace the marks (``<image>``, ...) of some kinds of media by private-use characters."""
        for kind in kinds:
            self._kinds = {chr(self._base + slot): each for each, slot in _MEDIA_SLOTS.items()}
            string = string.replace(MEDIA_MARKS[kind], chr(self._base + _MEDIA_SLOTS[kind]))
        return string

    def split_media(self, string: str) -> list[dict[str, str]]:
        """Return the texts and media of a text whose marks ``escape_media`` has replaced, as some templates need it."""
        pieces = re.split(f"([{''.join(self._kinds)}])", string) if self._kinds else [string]
        parts = [
            {"type": self._kinds[piece]} if piece in self._kinds else {"type": "text", "text": piece}
            for piece in pieces
            if piece
        ]
        return parts or [{"type": "text", "text": ""}]

    def split(self, rendered: str, placeholders: Mapping[str, str] = _NO_PLACEHOLDERS) -> list[Chunk]:
        """Split a rendered conversation at its control tokens; ``placeholders``: kinds of media by their texts."""
        other_texts = [text for text in placeholders if text not in self._vocabulary.ids]
        parts = self._vocabulary.split_pattern((*self._kinds, *other_texts)).split(rendered)
        texts, controls = parts[::2], ["", *parts[1::2]]
        if self._has_escaped:
            escaped = {self._base + slot: text for slot, text in enumerate(self._vocabulary.texts)}
            texts = [text.translate(escaped) for text in texts]
        kinds = {**placeholders, **self._kinds}
        return [Chunk(control, kinds.get(control, ""), text) for control, text in zip(controls, texts, strict=True)]


class ControlVocabulary:
    """The control tokens of a tokenizer: its special tokens, and others given.

    Args:
        tokenizer: the backend tokenizer. It is changed: control tokens in texts are tokenized as text from now on.
        always_control: tokens that mark media or open turns, which the tokenizer may not mark as special.

    Attributes:
        ids: id of each control token by its text, ascending.
        texts: the control tokens in that order.
        slots: index of each control token in ``texts``.
        strip_left, strip_right: control tokens that absorb the blanks before or after them.
        pattern: finds control tokens in a text, the longest first.
    """

    def __init__(self, tokenizer: Tokenizer, always_control: Sequence[str] = ()) -> None:
        _mark_as_special(tokenizer, always_control)
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: added[token_id] for token_id in sorted(added) if added[token_id].special}
        if len(special) > _NUM_SLOTS:
            raise ConfigError(f"the tokenizer has {len(special)} control tokens; packtool supports {_NUM_SLOTS}")
        self.ids = {token.content: token_id for token_id, token in special.items()}
        self.texts = tuple(self.ids)
        self.slots = {text: slot for slot, text in enumerate(self.texts)}
        self.strip_right = frozenset(token.content for token in special.values() if token.rstrip)
        self.strip_left = frozenset(token.content for token in special.values() if token.lstrip)
        self._longest_first = sorted(self.texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self._longest_first)) or _NOTHING)
        self._split_patterns: dict[tuple[str, ...], re.Pattern[str]] = {}
        tokenizer.encode_special_tokens = True  # control tokens in texts are tokenized as text

    def split_pattern(self, marks: tuple[str, ...]) -> re.Pattern[str]:
        """Return a pattern that splits at control tokens and at the texts that stand for media, and keeps both."""
        if marks not in self._split_patterns:
            # Single characters, not a class: with literals only, re skips to their first characters at once.
            literals = "|".join(map(re.escape, (*marks, *self._longest_first))) or _NOTHING
            self._split_patterns[marks] = re.compile(f"({literals})")
        return self._split_patterns[marks]


def _mark_as_special(tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Mark the added tokens with these texts as special, since the library can tokenize only such tokens as text."""
    added = tokenizer.get_added_tokens_decoder().values()
    special_texts = {token.content for token in added if token.special}
    marked: list[AddedToken] = []
    for token in added:
        if token.content in texts and token.content not in special_texts:
            blanks = {"lstrip": token.lstrip, "rstrip": token.rstrip}
            marked.append(AddedToken(token.content, **blanks, normalized=False, special=True))
    if marked:
        tokenizer.add_special_tokens(marked)


_MAX_WORDS = 1 << 20
_WORDS_PER_BATCH = 4096
_MAX_WORD_CHARS = 64
"""Longer words (base64, long punctuation) are not kept in the dictionary."""

_SAFE_RANGES = (
    *("\t\n\r", " -~", "\u00a1-\u00ff"),
    *("\u0391-\u03a1\u03a3-\u03c9", "\u0410-\u044f", "\u2010-\u2027\u2030-\u205e", "\u20ac"),
    *("\u2190-\u21ff", "\u2200-\u22ff", "\u2500-\u25ff", "\u2600-\u26ff", "\u2701-\u2767"),
    *("\u3000-\u3020", "\u3041-\u3094\u30a1-\u30fa", "\u4e00-\u9fa5", "\uac00-\ud7a3", "\uff01-\uff5e"),
    *("\U0001f300-\U0001f320", "\U0001f600-\U0001f64f"),
)
_UNSAFE = re.compile(f"[^{''.join(_SAFE_RANGES)}]")


class TextEnds(NamedTuple):
    """The first and the last ids of a text in one array, and the number of ids between them that are left out."""

    ids: array[int]
    num_omitted: int


class WordTokenizer:
    """Tokenizes plain text by a dictionary of words. Made by ``of``, which checks that this is exact.

    Args:
        tokenizer: the backend tokenizer, with ``encode_special_tokens`` set.
        added: id by text of the added tokens that are not special (``<think>``): these are matched in plain text.
    """

    def __init__(self, tokenizer: Tokenizer, pattern: str, added: dict[str, int]) -> None:
        self._words = _Words(tokenizer.model)
        expression = re.compile(_translated(pattern, _safe_chars()))
        self._split, self._iterate = expression.findall, expression.finditer
        self._added = {token: _to_bytes([token_id]) for token, token_id in added.items()}
        alternatives = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
        self._added_pattern = re.compile(f"({alternatives or '(?!)'})")
        self._is_normalized = tokenizer.normalizer is not None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordTokenizer | None:
        """Return a word tokenizer for a byte-level BPE tokenizer with a regular expression; None for all others."""
        pattern = _pattern(tokenizer)
        plain = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if not token.special}
        if pattern is None or any(token.lstrip or token.rstrip or token.single_word for token in plain.values()):
            return None
        return cls(tokenizer, pattern, {token.content: i for i, token in plain.items()})

    def num_words(self, text: str, enough: int) -> int:
        """Count the words of a text, each of at least one token, up to ``enough``; 0 if they cannot be counted."""
        if not self._can_split(text) or self._added_pattern.search(text):
            return 0
        return sum(1 for _ in islice(self._iterate(text), enough))

    def _can_split(self, text: str) -> bool:
        """Return whether ``_iterate`` and ``_split`` certainly split a text into the same words as the library."""
        is_ascii = text.isascii()
        # Most texts are ASCII with line breaks; a check for these alone is several times as fast.
        if not (is_ascii and text.replace("\n", "").isprintable()) and _UNSAFE.search(text):
            return False
        return is_ascii or not self._is_normalized or unicodedata.is_normalized("NFC", text)

    def ends(self, text: str, num_ids: int) -> TextEnds | None:
        """Tokenize a long text; keep at least the first and the last ``num_ids`` ids. None if it cannot be split."""
        if not self._can_split(text):
            return None
        words = self._iterate_ids(text)
        head = array("i")
        for word in words:
            head.frombytes(word)
            if len(head) >= num_ids:
                break
        # The iterator now gives the words after the head.
        tail = deque[int](maxlen=num_ids)  # drops the ids before the last ones
        num_after_head = 0
        while batch := list(islice(words, _WORDS_PER_BATCH)):
            batch_ids = array("i", b"".join(batch))
            tail.extend(batch_ids)
            num_after_head += len(batch_ids)
        return TextEnds(head + array("i", tail), num_omitted=num_after_head - len(tail))

    def _iterate_ids(self, text: str) -> Iterator[bytes]:
        """Yield the ids of each word of a text, and of each added token in it, as ``_to_bytes``."""
        for i, part in enumerate(self._added_pattern.split(text)):
            if i % 2:
                yield self._added[part]
            else:
                yield from map(self._words.__getitem__, map(re.Match.group, self._iterate(part)))

    def encode(self, text: str) -> array[int] | None:
        """Return the ids of a text; None if the library must tokenize it."""
        if not self._can_split(text):
            return None
        words: list[bytes] = []  # ids of each word
        for i, part in enumerate(self._added_pattern.split(text) if self._added else [text]):
            if i % 2:
                words.append(self._added[part])
            else:
                words += map(self._words.__getitem__, self._split(part))
        return array("i", b"".join(words))


def _to_bytes(ids: Sequence[int]) -> bytes:
    """Return ids as int32 in the bytes of memory: these are joined several times as fast as lists of ids."""
    return array("i", ids).tobytes()


class _Words(dict[str, bytes]):
    """Dictionary of ids by word, as ``_to_bytes``; words that are missing are tokenized by the byte-level BPE model."""

    def __init__(self, model: BPE) -> None:
        super().__init__()
        self._tokenize = model.tokenize
        self._symbols = _symbols_of_bytes()

    def __missing__(self, word: str) -> bytes:
        # Latin-1 has one character for each byte. The library's ``encode`` does the same in twice the time, because it
        # also normalizes and splits the word, and computes offsets.
        symbols = word.encode().decode("latin-1").translate(self._symbols)
        ids = _to_bytes([token.id for token in self._tokenize(symbols)])
        if len(self) < _MAX_WORDS and len(word) <= _MAX_WORD_CHARS:
            self[word] = ids
        return ids


def _symbols_of_bytes() -> dict[int, int]:
    """Return the characters that byte-level vocabularies write for bytes without a printable Latin-1 character."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return dict(zip(others, range(0x100, 0x200), strict=False))


def _pattern(tokenizer: Tokenizer) -> str | None:
    """Return the regular expression for words of a byte-level BPE tokenizer; None if it has any other steps."""
    model = tokenizer.model
    if not isinstance(model, BPE) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normalizer, splitter = _settings(tokenizer.normalizer), _settings(tokenizer.pre_tokenizer)
    steps = splitter.get("pretokenizers", ())
    if normalizer.get("type", "NFC") != "NFC" or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, byte_level = steps
    if byte_level["add_prefix_space"] or byte_level["use_regex"] or split["invert"] or split["behavior"] != "Isolated":
        return None
    pattern = split["pattern"].get("Regex")
    return pattern if isinstance(pattern, str) and _is_supported(pattern) else None


def _settings(component: Any) -> dict[str, Any]:
    if component is None:
        return {}
    try:
        return dict(json.loads(component.__getstate__()))
    except Exception:  # the library raises various types for a component that is written in Python
        return {"type": "unknown"}


@cache
def _safe_chars() -> str:
    return _UNSAFE.sub("", "".join(map(chr, range(0x20000))))


@cache
def _translated(pattern: str, chars: str) -> str:
    """Replace ``\\p{L}`` (letters), ``\\p{N}`` (numbers), ``\\s`` and ``\\S`` in a pattern by matching ``chars``.

    With the chars "ab1", ``\\p{L}+`` becomes ``[a-b]+``. Python's ``re`` does not support Unicode categories, but is
    twice as fast as the ``regex`` module, which does.
    """
    letters = [char for char in chars if unicodedata.category(char).startswith("L")]
    numbers = [char for char in chars if unicodedata.category(char).startswith("N")]
    spaces = _as_ranges(filter(str.isspace, chars))
    ranges_by_class = {r"\p{L}": _as_ranges(letters), r"\p{N}": _as_ranges(numbers), r"\s": spaces}

    translated: list[str] = []
    is_in_brackets = False
    # A token is ``\p{L}``, ``\p{N}``, another escaped character, or a single character.
    for token in re.findall(r"\\p\{[LN]\}|\\.|.", pattern, re.DOTALL):
        if token in ("[", "]"):
            is_in_brackets = token == "["
        if token == r"\S":  # ``_is_supported`` has refused it within brackets
            token = f"[^{spaces}]"
        elif token in ranges_by_class:
            ranges = ranges_by_class[token]
            token = ranges if is_in_brackets else f"[{ranges}]"
        translated.append(token)
    return "".join(translated)


def _as_ranges(chars: Iterable[str]) -> str:
    """Return ascending characters as ranges for a character class."""
    ranges: list[tuple[int, int]] = []
    for code in map(ord, chars):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1] = ranges[-1][0], code
        else:
            ranges.append((code, code))
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in ranges)


def _is_supported(pattern: str) -> bool:
    """Return whether ``re`` and the library read a pattern alike: only letters, numbers, blanks and simple groups."""
    rest = re.sub(r"\\p\{[LN]\}|\\[srnS]|\(\?[i!]?:?|\{\d+(,\d+)?\}|[\[\]()^|?*+']", "", pattern)
    return re.fullmatch(r"[A-Za-z .:!]*", rest) is not None and not re.search(r"\[[^\]]*\\S", pattern)


def _is_lossless(tokenizer: Tokenizer) -> bool:
    model, normalizer = tokenizer.model, _settings(tokenizer.normalizer)
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    splitter = _settings(tokenizer.pre_tokenizer)
    steps = splitter.get("pretokenizers", [splitter] if splitter else [])
    if any(step["type"] == "ByteLevel" for step in steps):
        splits = ("Split", "ByteLevel", "Digits")
        is_known = all(step["type"] in splits and step.get("behavior") != "Removed" for step in steps)
        return is_known and normalizer.get("type", "NFC") == "NFC"
    # Llama's and Gemma's normalizers keep the length: a mark for each blank, and perhaps one before the text.
    return bool(model.byte_fallback and not steps) and all(
        each["type"] == "Prepend" or (each["type"] == "Replace" and each["pattern"] == {"String": " "})
        for each in normalizer.get("normalizers", [normalizer] if normalizer else [])
    )


# Short texts (a newline, a role) occur in every turn of every row, so their ids are cached.
_MAX_CHUNK_CHARS = 64
_MAX_CHUNKS = 100_000
_MAX_COMPOSED = 4  # maximum characters that normalization (NFC) composes into one
_PROBES = ("user\nHello, world", "\n", " a  b\n\nc", "1 + 1 = 2. 你好")


class ChunkTokenizer:
    """Tokenizes chunks one by one; their ids equal those of tokenizing the whole conversation.

    Most tokenizers (all byte-level BPE ones) give a text the same ids wherever it is. Some SentencePiece ones put a
    space before the first text only, so texts are tokenized behind their control tokens. The kind is determined once,
    with some example texts. The backend ``tokenizer`` must have ``encode_special_tokens`` set.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: ControlVocabulary) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._words = WordTokenizer.of(tokenizer)
        self._cached_ids: dict[str, array[int]] = {}
        usable = next((text for text in vocabulary.texts if text not in vocabulary.strip_right), None)
        self.context_free = usable is None or all(
            self._encode_after_control(Chunk(usable, "", probe)) == self._plain(probe) for probe in _PROBES
        )

    def encode(self, chunks: Sequence[Chunk]) -> list[array[int]]:
        """Return the ids of each chunk's text, without its control token."""
        if not self.context_free:  # the ids of a text depend on the control token before it
            return [self._encode_after_control(chunk) for chunk in chunks]
        if self._vocabulary.strip_left or self._vocabulary.strip_right:
            texts = [self._trimmed(chunks, i) for i in range(len(chunks))]
        else:
            texts = [chunk.text for chunk in chunks]
        new_ids = self._encode_new(texts)
        ids_of_chunks = [new_ids[text] if text in new_ids else self._cached_ids[text] for text in texts]
        if len(self._cached_ids) < _MAX_CHUNKS:
            self._cached_ids.update({text: ids for text, ids in new_ids.items() if len(text) <= _MAX_CHUNK_CHARS})
        return ids_of_chunks

    def _encode_new(self, texts: Sequence[str]) -> dict[str, array[int]]:
        """Return the ids of the texts that are not cached, by text."""
        new_ids: dict[str, array[int]] = {"": array("i")}  # the empty text has no ids
        new_texts = list(dict.fromkeys(text for text in texts if text and text not in self._cached_ids))
        library_texts: list[str] = []  # texts that the word tokenizer cannot tokenize
        for text in new_texts:
            ids = None if self._words is None else self._words.encode(text)
            if ids is None:
                library_texts.append(text)
            else:
                new_ids[text] = ids
        if library_texts:
            encodings = self._tokenizer.encode_batch_fast(library_texts, add_special_tokens=False)
            for text, encoding in zip(library_texts, encodings, strict=True):
                new_ids[text] = array("i", encoding.ids)
        return new_ids

    def min_tokens(self, chunks: Sequence[Chunk], enough: int) -> int:
        """Return a lower bound on the number of tokens of the chunks' texts; counting stops at ``enough``."""
        num_tokens = 0
        if self.context_free and self._max_token_chars:
            for i in range(len(chunks)):
                text = self._trimmed(chunks, i)
                num_chars = len(text)
                is_composing = not text.isascii() and self._tokenizer.normalizer is not None
                if is_composing and not unicodedata.is_normalized("NFC", text):
                    num_chars = -(-num_chars // _MAX_COMPOSED)
                num_text_tokens = -(-num_chars // self._max_token_chars)
                if num_tokens + num_text_tokens < enough and text and self._words is not None:
                    num_text_tokens = max(num_text_tokens, self._words.num_words(text, enough - num_tokens))
                num_tokens += num_text_tokens
                if num_tokens >= enough:
                    break
        return num_tokens

    @cached_property
    def _max_token_chars(self) -> int:
        """Maximum number of characters of one token; 0 if the tokenizer may lose characters."""
        tokens = self._tokenizer.get_added_tokens_decoder().values()
        if any(not token.special and (token.lstrip or token.rstrip) for token in tokens):
            return 0
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True) if _is_lossless(self._tokenizer) else ()
        return max(map(len, vocabulary), default=0)

    def ends(self, chunks: Sequence[Chunk], i: int, num_ids: int) -> TextEnds | None:
        """Tokenize the text of chunk ``i`` as ``WordTokenizer.ends``; None if all of it must be tokenized."""
        if self._words is None or not self.context_free:
            return None
        return self._words.ends(self._trimmed(chunks, i), num_ids)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Return the characters [start, end) of each token of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def _trimmed(self, chunks: Sequence[Chunk], i: int) -> str:
        """Return the text of chunk ``i`` without the blanks that the control tokens around it absorb."""
        text = chunks[i].text
        if chunks[i].control in self._vocabulary.strip_right:
            text = text.lstrip()
        if i + 1 < len(chunks) and chunks[i + 1].control in self._vocabulary.strip_left:
            text = text.rstrip()
        return text

    def _plain(self, text: str) -> array[int]:
        return array("i", self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _encode_after_control(self, chunk: Chunk) -> array[int]:
        """Return the ids that a chunk's text has behind its control token."""
        if chunk.control not in self._vocabulary.ids or self._vocabulary.pattern.search(chunk.text):
            # Control tokens are tokenized as text here, so a newline takes the place of the chunk's own.
            newline = self._plain("\n")
            ids = self._plain("\n" + chunk.text)
            return ids[len(newline) :] if chunk.control and ids[: len(newline)] == newline else self._plain(chunk.text)
        self._tokenizer.encode_special_tokens = False
        try:
            return self._plain(chunk.control + chunk.text)[1:]
        finally:
            self._tokenizer.encode_special_tokens = True
