"""Exact match of a model's answers with their labels, computed in packed forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.planning.packing import pack
from packtool.progress import Progress, SilentProgress
from packtool.train.evaluate.per_sample import Scorer, evaluating
from packtool.train.model.load import load_trained, quiet_transformers
from packtool.train.model.precision import checkpoint_dtype
from packtool.train.prepare.trained import TrainedModel


def exact_match(
    model: str, cached_dataset: str, *, packing_length: int, progress: Progress | None = None
) -> list[tuple[int, int, bool]]:
    """Check for each assistant turn of a cache whether the model predicts all of its tokens.

    The model gets the true previous tokens; nothing is generated. Samples are packed to save time.

    Args:
        model: directory of a model, or of an adapter whose base model has not moved.
        cached_dataset: a cache that was exported for this model.
        packing_length: maximum tokens of a forward pass; raised to those of the longest sample.

    Returns:
        for every assistant turn, in the order of the cache: the position of its sample, its 0-based number in the
        sample, and whether all of its targets are the model's most likely tokens.
    """
    progress = progress or SilentProgress()
    reader = CacheReader.open([cached_dataset])
    loaded_model, spec = _load_model(model, reader)
    lengths = reader.index.length
    capacity = max(packing_length, int(lengths.max(initial=1)))
    plan = pack(lengths, capacity, seed=0)

    exact_turns: dict[int, list[bool]] = {}  # of each sample, by its position
    progress.start("evaluate", plan.num_packs)
    with evaluating(loaded_model, packed=True) as scorer:
        for pack_number in range(plan.num_packs):
            positions = plan.pack(pack_number).tolist()
            samples = [reader.sample(position) for position in positions]
            turns_by_sample = _exact_turns(scorer, samples, spec)
            exact_turns |= zip(positions, turns_by_sample, strict=True)
            progress.advance(1)
    progress.finish()

    rows = []
    for position, turns in sorted(exact_turns.items()):
        rows += [(position, turn_number, is_exact) for turn_number, is_exact in enumerate(turns)]
    return rows


def _load_model(model: str, reader: CacheReader) -> tuple[nn.Module, InputSpec]:
    """Load a model, or an adapter with its base model, onto the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = TrainedModel.find(model)
    spec = InputSpec.load(trained.base, reader.manifests[0].identity.media_limits)
    dtype = checkpoint_dtype(spec.config) if device == "cuda" else torch.float32
    with quiet_transformers():
        return load_trained(trained, spec, dtype).to(device), spec


def _exact_turns(scorer: Scorer, samples: Sequence[EncodedSample], spec: InputSpec) -> Iterator[list[bool]]:
    """Yield, for each sample of a pack, whether all targets of each of its assistant turns are predicted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = collate_packs(samples, spec).to(device)
    _, is_correct = scorer(batch)
    # Entry i, (T,), tells whether token i + 1 is predicted; tokens that are no targets count as predicted.
    is_exact = (is_correct | (batch.labels == IGNORE_INDEX))[0].cpu().numpy()
    starts = batch.cu_seqlens[: len(samples)].tolist()
    for sample, start in zip(samples, starts, strict=True):
        is_exact_in_sample = is_exact[start : start + sample.length]
        turns = sample.turns.reshape(-1, 2).tolist()  # start and end of each turn, in tokens of the sample
        yield [bool(is_exact_in_sample[max(begin - 1, 0) : end - 1].all()) for begin, end in turns]
