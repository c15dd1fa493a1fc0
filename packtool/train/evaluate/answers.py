"""Exact match of a model's answers with their labels, computed in packed forward passes."""

from __future__ import annotations

import torch

from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.constants import IGNORE_INDEX
from packtool.planning.packing import pack
from packtool.progress import Progress, SilentProgress
from packtool.train.evaluate.per_sample import evaluating
from packtool.train.model.load import load_trained, quiet_transformers
from packtool.train.model.precision import checkpoint_dtype
from packtool.train.prepare.trained import TrainedModel


def exact_match(
    model: str, cached_dataset: str, *, packing_length: int, progress: Progress | None = None
) -> list[tuple[int, int, bool]]:
    """Compare every assistant turn of a cache with the model's predictions given the true previous text.

    Args:
        model: directory of a model, or of an adapter whose base model has not moved.
        cached_dataset: a cache that was exported for this model.
        packing_length: maximum tokens of a forward pass; a longer sample gets its own pass.

    Returns:
        for every assistant turn, in the order of the cache: the position of its sample, its 0-based number in the
        sample, and whether all of its targets are the model's most likely tokens.
    """
    progress = progress or SilentProgress()
    reader = CacheReader.open([cached_dataset])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = TrainedModel.find(model)
    spec = InputSpec.load(trained.base, reader.manifests[0].identity.media_limits)
    dtype = checkpoint_dtype(spec.config) if device == "cuda" else torch.float32
    with quiet_transformers():
        loaded = load_trained(trained, spec, dtype).to(device)
    lengths = reader.index.length
    plan = pack(lengths, max(packing_length, int(lengths.max(initial=1))), seed=0)
    exact_turns: dict[int, list[bool]] = {}  # of each sample, by its position
    progress.start("evaluate", plan.num_packs)
    with evaluating(loaded, packed=True) as scorer:
        for number in range(plan.num_packs):
            positions = [int(position) for position in plan.pack(number)]
            samples = [reader.sample(position) for position in positions]
            batch = collate_packs(samples, spec).to(device)
            _, correct = scorer(batch)
            is_exact = (correct | (batch.labels == IGNORE_INDEX))[0].cpu().numpy()
            starts = batch.cu_seqlens[: len(samples)].tolist()
            for position, sample, start in zip(positions, samples, starts, strict=True):
                sample_exact = is_exact[start : start + sample.length]  # entry i predicts token i + 1
                spans = sample.turns.reshape(-1, 2).tolist()
                exact_turns[position] = [bool(sample_exact[max(begin - 1, 0) : end - 1].all()) for begin, end in spans]
            progress.advance(1)
    progress.finish()
    by_sample = sorted(exact_turns.items())
    return [(position, turn, is_exact) for position, turns in by_sample for turn, is_exact in enumerate(turns)]
