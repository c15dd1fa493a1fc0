"""How many tokens a text has at least, told from its characters and words alone.

A text that cannot fit is known for one before it is tokenized, which takes a hundred times its size in memory: no token
is longer than the vocabulary's longest, and no token crosses the border of two words. Both hold for tokenizers that
lose nothing of a text: byte-level BPE, and BPE that falls back to bytes. For others nothing is promised.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from packtool.encode.words import WordTokenizer, component_settings

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
