"""What a compiled layer hands on to its attention without looking at it.

torch.compile guards whatever it can see of a call: a compiled function is compiled anew for another number of documents
and another longest one, so for nearly every micro-batch. Attention and recurrent layers are not compiled themselves,
and nothing else in a layer asks where documents end; so the boundaries pass through it in an object that has no parts a
compiler would read.
"""

from __future__ import annotations

from typing import Any

_HIDDEN = frozenset(
    (
        *("cu_seq_lens_q", "max_length_q", "document_lengths"),
        *("cu_seq_lens_k", "max_length_k", "key_lengths", "key_index"),
        "sequence_shard",
    )
)
_NAME = "packtool_boundaries"


class Opaque:
    """Holds keyword arguments."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


def with_hidden_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a layer, with those that say where documents end in one opaque object."""
    hidden = {name: value for name, value in kwargs.items() if name in _HIDDEN}
    return {name: value for name, value in kwargs.items() if name not in hidden} | {_NAME: Opaque(hidden)}


def with_shown_boundaries(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments as they were before ``with_hidden_boundaries``; as they are, if nothing is hidden."""
    if (held := kwargs.get(_NAME)) is None:
        return kwargs
    return {name: value for name, value in kwargs.items() if name != _NAME} | held.arguments
