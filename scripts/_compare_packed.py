"""Leakage between packed samples, for compare_tools.py: losses of packs and of their samples alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Sample = tuple[list[int], list[int]]
# The first step has a learning rate of 0, so both steps are trained with the initial weights.
NUM_INITIAL_STEPS = 2


def find_samples(ids: Sequence[int], samples: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the first token of each sample in a pack, and the first token after it.

    Args:
        ids: token ids of a pack; padding and single tokens between samples are skipped.
        samples: token ids of all samples, none of which is the beginning of another one.
    """
    start = 0
    while start < len(ids):
        length = next((len(known) for known in samples if list(known) == list(ids[start : start + len(known)])), 0)
        if length:
            yield start, start + length
        start += max(length, 1)


def sum_losses(model: Any, ids: Sequence[int], targets: Sequence[int]) -> float:
    """Return the sum of the losses of the targets (positions) in one sequence without packing."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0].float()
    places = [place for place in targets if place]
    chosen = logits[[place - 1 for place in places]]
    return float(torch.nn.functional.cross_entropy(chosen, torch.tensor([ids[i] for i in places]), reduction="sum"))


def largest_leakage(
    folder: Path, samples: Sequence[Sample], steps: Sequence[Mapping[str, Any]]
) -> tuple[int, float, float]:
    """Compare the losses of the first packs with those of their samples alone.

    Args:
        folder: the initial model.
        samples: all samples, as an unpacked run recorded them.
        steps: records of a run with one pack per step.

    Returns:
        the number of packs with several samples, the largest difference of a pack's loss and the mean loss of its
        samples alone, and the largest difference if all tokens of a pack see all tokens before them.

    Raises:
        SystemExit: the first steps have no pack with several samples.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    leakages, unisolated = [], []
    for step in steps[:NUM_INITIAL_STEPS]:
        ids = [token for sample, _ in step["samples"] for token in sample]
        starts = [sum(len(sample) for sample, _ in step["samples"][:i]) for i in range(len(step["samples"]))]
        targets = [start + i for start, (_, places) in zip(starts, step["samples"], strict=True) for i in places]
        bounds = list(find_samples(ids, [sample for sample, _ in samples]))
        if len(bounds) < 2:
            continue
        # A token after the last sample (a line break or the end of the text) belongs to the sample before it.
        ends = [start for start, _ in bounds[1:]] + [len(ids)]
        alone = 0.0
        for (start, _), end in zip(bounds, ends, strict=True):
            alone += sum_losses(model, ids[start:end], [i - start for i in targets if start <= i < end])
        trained = sum(i not in {start for start, _ in bounds} for i in targets)
        leakages.append(abs(step["loss"] - alone / trained))
        unisolated.append(abs(sum_losses(model, ids, targets) - alone) / trained)
    if not leakages:
        raise SystemExit("the first steps have no pack with several samples")
    return len(leakages), max(leakages), max(unisolated)
