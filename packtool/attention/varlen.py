"""Where the documents of a packed sequence lie, and what each of their tokens sees.

Three documents of 3, 2 and 4 tokens, ``cu_seqlens = [0, 3, 5, 9]``; a query (row) sees the keys (columns) marked x::

        a a a b b c c c c
    a   x . . . . . . . .
    a   x x . . . . . . .
    a   x x x . . . . . .
    b   . . . x . . . . .
    b   . . . x x . . . .
    c   . . . . . x . . .
    c   . . . . . x x . .
    c   . . . . . x x x .
    c   . . . . . x x x x

Documents that begin alike can have their common prefix computed once. A prefix p of 3 tokens with the continuations a
and b, of 2 tokens each, are 7 tokens, ``cu_seqlens = [0, 3, 5, 7]``. Their keys and values are gathered into the layout
of whole documents, ``keys.cu_seqlens = [0, 3, 8, 13]``, and the queries of a document are the last of its keys::

        p p p p p p a a p p p b b
    p   x . . . . . . . . . . . .
    p   x x . . . . . . . . . . .
    p   x x x . . . . . . . . . .
    a   . . . x x x x . . . . . .
    a   . . . x x x x x . . . . .
    b   . . . . . . . . x x x x .
    b   . . . . . . . . x x x x x

No kernel builds this mask but the reference. Shapes use T packed tokens, S documents, Hq and Hkv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class LeakError(RuntimeError):
    """A call in which one document of a pack could see another: a bug in the caller, or a model that is not known."""


@dataclass(frozen=True, eq=False)
class Varlen:
    """Where the documents of a packed sequence lie.

    Args:
        cu_seqlens: int32 (S + 1,), starts of the documents and T at the end.
        max_seqlen: tokens of the longest one.
        lengths: the S lengths on the host, if the caller has them; saves reading ``cu_seqlens`` back from a GPU.
        causal: no token sees later ones; False, as in the towers of media, each sees its whole document.
        keys: where the S documents of keys and values lie, if these begin before their queries do: document i of the
            queries is the end of document i of the keys, and none has keys alone. None where both are the same tokens.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    lengths: tuple[int, ...] | None = None
    causal: bool = True
    keys: Varlen | None = None

    @property
    def of_keys(self) -> Varlen:
        """The documents of keys and values; itself where they are those of the queries."""
        return self if self.keys is None else self.keys

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Varlen:
        """Documents of these lengths, end to end."""
        cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return cls(cu_seqlens, max(lengths, default=0), tuple(lengths))

    def host_lengths(self) -> tuple[int, ...]:
        """Length of every document, as Python integers."""
        if self.lengths is not None:
            return self.lengths
        return tuple(self.cu_seqlens.diff().tolist())

    def documents(self, num_tokens: int) -> Iterator[slice]:
        """The tokens of each document that has any, in order.

        Args:
            num_tokens: T of the sequence, which the documents must add up to.
        """
        lengths = self.host_lengths()
        # Tokens behind the last document would be left without an output, silently.
        assert sum(lengths) == num_tokens, "the documents do not add up to the packed sequence"
        start = 0
        for length in lengths:
            if length:
                yield slice(start, start + length)
            start += length
