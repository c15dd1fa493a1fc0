"""How many answers a model gives exactly as labelled, in packed forward passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.constants import IGNORE_INDEX, TRAIN_SPLIT
from packtool.encode.encoded import EncodedSample
from packtool.planning.packing import pack
from packtool.progress import Progress, SilentProgress
from packtool.train.evaluate.scorer import evaluating
from packtool.train.model.load import load_trained, quiet_transformers
from packtool.train.model.precision import checkpoint_dtype
from packtool.train.prepare.trained import TrainedModel


@dataclass(frozen=True, eq=False)
class ExactMatch:
    """One entry for every assistant turn of a cache, in the cache's order; arrays of one length.

    Args:
        sample: int64, position in the cache.
        turn: int64, 0-based among the sample's assistant turns.
        exact: whether the most likely token is the label at every target of the turn, given all before it.
    """

    sample: npt.NDArray[np.int64]
    turn: npt.NDArray[np.int64]
    exact: npt.NDArray[np.bool_]

    @property
    def num_turns(self) -> int:
        """The number of the assistant's turns."""
        return len(self.exact)

    @property
    def accuracy(self) -> float:
        """Share of the turns that are exact; 0 when there are none."""
        return float(self.exact.mean()) if self.num_turns else 0.0


def exact_match(
    model: str,
    cached_dataset: str,
    *,
    packing_length: int,
    split: str = TRAIN_SPLIT,
    progress: Progress | None = None,
) -> ExactMatch:
    """Check every assistant turn of a cache, with the true text before each token (teacher forcing).

    Args:
        model: directory of a model, or of an adapter whose base model is still where it was.
        cached_dataset: a cache that was exported for it.
        packing_length: tokens of a forward pass; a longer sample gets one of its own.
        split: of the cache.

    Raises:
        DataError: naming a picture that cannot be read.
        UnsupportedModelError: for a model that cannot be packed.
    """
    progress = progress or SilentProgress()
    reader = CacheReader.open([cached_dataset], split)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = TrainedModel.find(model)
    spec = InputSpec.load(trained.base, reader.manifests[0].identity.media_limits)
    dtype = checkpoint_dtype(spec.config) if device == "cuda" else torch.float32
    with quiet_transformers():
        loaded = load_trained(trained, spec, dtype).to(device)
    lengths = reader.index.length
    plan = pack(lengths, max(packing_length, int(lengths.max(initial=1))), seed=0)
    found: dict[int, list[bool]] = {}
    progress.start("evaluate", plan.num_packs)
    with evaluating(loaded, packed=True) as scorer:
        for number in range(plan.num_packs):
            positions = [int(position) for position in plan.pack(number)]
            samples = [reader.sample(position) for position in positions]
            batch = collate_packs(samples, spec).to(device)
            _, correct = scorer(batch)
            is_exact = (correct | (batch.labels == IGNORE_INDEX))[0].cpu().numpy()
            for position, sample, start in zip(positions, samples, batch.cu_seqlens.tolist(), strict=False):
                found[position] = _exact_turns(sample, is_exact[start : start + sample.length])
            progress.advance(1)
    progress.finish()
    in_order = [(position, turn, exact) for position in sorted(found) for turn, exact in enumerate(found[position])]
    sample_ids, turns, exacts = zip(*in_order, strict=True) if in_order else ((), (), ())
    return ExactMatch(np.array(sample_ids, np.int64), np.array(turns, np.int64), np.array(exacts, np.bool_))


def _exact_turns(sample: EncodedSample, is_exact: npt.NDArray[np.bool_]) -> list[bool]:
    """Whether each turn is the most likely text at all of its targets; token i is predicted at position i - 1."""
    spans = sample.turns.reshape(-1, 2).tolist()
    return [bool(is_exact[max(start - 1, 0) : end - 1].all()) for start, end in spans]
