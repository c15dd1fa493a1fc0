"""What each micro-batch holds, for ``--debug``: its samples and packs, and the shapes of its tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from torch import Tensor

from packtool.batch.batch import Batch

_LOG = logging.getLogger("packtool.train.batches")


def is_watched() -> bool:
    """Whether anybody listens: what is told costs time."""
    return _LOG.isEnabledFor(logging.DEBUG)


def watched(batches: Iterable[Batch], held: Iterator[str], *, rank: int, step: int, num: int) -> Iterator[Batch]:
    """The same micro-batches, each told when it is handed out.

    Args:
        held: the samples of each, in words.
        rank: that trains them.
        step: optimizer steps done before.
        num: micro-batches of the step on this rank.
    """
    for number, batch in enumerate(batches, start=1):
        words = next(held, "")
        _LOG.debug("rank %d, step %d, micro-batch %d of %d: %s", rank, step + 1, number, num, described(batch, words))
        yield batch


def described(batch: Batch, held: str) -> str:
    """One line on a micro-batch."""
    shapes = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, **batch.media}
    told = [f"{name} {tuple(value.shape)}" for name, value in shapes.items() if isinstance(value, Tensor)]
    lengths = getattr(batch, "lengths", None)
    if lengths is not None:
        told.append("lengths " + "+".join(str(length) for length in lengths))
    told.append(f"{batch.num_target_tokens} targets")
    if batch.skipped:
        told.append(f"{len(batch.skipped)} samples skipped")
    return "; ".join([held, *told] if held else told)
