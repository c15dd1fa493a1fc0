"""Plain text between two control tokens becomes ids."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from packtool.encode.control import ControlVocabulary, Piece
from packtool.encode.least_tokens import LeastTokens
from packtool.encode.words import WordTokenizer

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
