"""A reduced model of each family on a sequence that ranks share, against the same sequence on one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import set_attention
from packtool.batch.batch import Batch, PackedBatch, ShardedBatch, ShardedTreeBatch
from packtool.batch.collate import collate_packs
from packtool.batch.collate_shard import collate_shard
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.planning.skrull import SHARDED
from packtool.train.model.loss import takes_logits_to_keep, target_losses
from tests.attention.hybrids import HYBRIDS, hybrid_config, hybrid_model
from tests.batch.reduced import (
    TEXT_MODELS,
    make_sample,
    mixed_samples,
    prefix_samples,
    reduced_limits,
    reduced_model,
    reduced_spec,
    save_image_processor,
)

Setting = tuple[InputSpec, PreTrainedModel, list[EncodedSample]]
Found = tuple[list[Tensor], float, dict[str, Tensor]]
"""Logits of each sample, the sum of losses, the gradients of parameters."""


def forward_alone(setting: Setting) -> Found:
    """What the sequence gives on one rank."""
    spec, model, samples = setting
    set_attention(model)
    return _run(model, collate_packs(samples, spec), [sample.length for sample in samples], None)


def make_setting(name: str, directory: Path) -> Setting:
    """A reduced model of a family, with samples.

    Args:
        directory: for what its processor reads, by the model's name.
    """
    place = directory / name
    place.mkdir()
    return _hybrid(name, str(place)) if name in HYBRIDS else _reduced(name, str(place))


def check_model(setting: Setting, expected: Found, parallel: SequenceParallel) -> list[float]:
    """See ``check_setting``."""
    all_sharded = check_setting(setting, expected, parallel, [SHARDED] * len(setting[2]))
    return [max(pair) for pair in zip(all_sharded, check_setting(setting, expected, parallel), strict=True)]


def check_setting(
    setting: Setting, expected: Found, parallel: SequenceParallel, places: list[int] | None = None
) -> list[float]:
    """Largest differences of logits, loss and parameter gradients; some samples are local without ``places``.

    The last number is how far the logits of other samples move when one is changed.

    Args:
        expected: what the sequence gives ``alone``, which ranks that were forked need not all find out.
    """
    spec, model, samples = setting
    logits, loss, gradients = expected
    lengths = [sample.length for sample in samples]
    set_attention(model, "auto", parallel)
    if places is None:
        places = [index % parallel.split.size if index % 3 else SHARDED for index in range(len(samples))]
    batch = collate_shard(samples, spec, parallel.split, places)
    other, its_loss, its_gradients = _run(model, batch, lengths, parallel)
    assert its_gradients.keys() == gradients.keys(), "ranks wait for every one"
    moved = _logits(model, _changed(batch, samples, changed_sample=2), lengths, parallel)
    assert _difference(moved[2], other[2]) > 1e-3, "the change was felt"
    return [
        max(map(_difference, other, logits)),
        abs(its_loss - loss) / max(abs(loss), 1.0),
        max(_difference(its_gradients[key], gradients[key]) for key in gradients),
        max(_difference(moved[i], other[i]) for i in range(len(samples)) if i != 2),
    ]


def tree_setting(name: str, directory: Path) -> Setting:
    """The model of ``make_setting`` in float64, with samples that share prefixes at two levels."""
    spec, model, _ = make_setting(name, directory)
    return spec, model.double(), prefix_samples(reduced_limits(spec.config))


def gradients_of(setting: Setting, parallel: SequenceParallel | None = None) -> tuple[float, dict[str, Tensor]]:
    """The sum of losses and the gradients of parameters: of each sample alone, or of their tree on several ranks."""
    spec, model, samples = setting
    set_attention(model, "auto", parallel)
    model.zero_grad(set_to_none=True)
    batches: list[Batch] = []
    if parallel is None:
        batches += [collate_packs([sample], spec) for sample in samples]
    else:
        batch = collate_shard(samples, spec, parallel.split, min_shared=1, pad_to_multiple_of=5)
        assert isinstance(batch, ShardedTreeBatch)
        assert batch.shard.sharded_lengths != batch.shard.sharded_tokens or parallel.split.ring_size == 1
        batches.append(batch)
    takes_logits = takes_logits_to_keep(model)
    losses = [target_losses(model, each, label_logits_only=takes_logits).weighted_sum() for each in batches]
    torch.autograd.backward(losses)
    total = torch.stack([loss.detach() for loss in losses]).sum()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if parallel is not None:
        for tensor in (total, *gradients.values()):
            dist.all_reduce(tensor, group=parallel.group)
    return float(total), gradients


def tree_errors(setting: Setting, expected: tuple[float, dict[str, Tensor]], parallel: SequenceParallel) -> list[float]:
    """Largest differences of the loss and the gradients of a tree that ranks share from those of its samples alone."""
    loss, gradients = gradients_of(setting, parallel)
    assert gradients.keys() == expected[1].keys()
    differences = [_difference(gradients[name], expected[1][name]) for name in gradients]
    return [abs(loss - expected[0]) / max(abs(expected[0]), 1.0), max(differences)]


def _reduced(name: str, directory: str) -> Setting:
    if name not in TEXT_MODELS:
        save_image_processor(name, directory)
    return reduced_spec(name, directory), reduced_model(name), mixed_samples(name)


def _hybrid(name: str, directory: str) -> Setting:
    """With samples longer than a chunk of the recurrence, and shorter than its convolution.

    In float64: projections to fewer heads are rounded in other places, which the state of many tokens enlarges.
    """
    config, model = hybrid_config(name), hybrid_model(name).double()
    model.set_experts_implementation("eager")  # others take no float64
    limits = reduced_limits(config)
    pictures = [] if limits is None else [((40, 32),), ((20, 60), (16, 16))]
    if limits is not None:
        save_image_processor("qwen3_vl", directory)
    samples = [make_sample(length, seed=length) for length in (75, 1, 9, 2)]
    samples += [make_sample(7, sizes, seed=seed, limits=limits) for seed, sizes in enumerate(pictures)]
    return InputSpec(directory, config, MediaLimits(limits)), model, samples


def _run(model: PreTrainedModel, batch: Batch, lengths: Sequence[int], parallel: SequenceParallel | None) -> Found:
    """The same on all ranks."""
    model.zero_grad(set_to_none=True)
    loss = target_losses(model, batch, label_logits_only=takes_logits_to_keep(model)).weighted_sum()
    torch.autograd.backward(loss)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = loss.detach().clone()
    if parallel is not None:
        # At once: each exchange costs more than what it moves.
        together = torch.cat([total.view(1), *(gradient.flatten() for gradient in gradients.values())])
        dist.all_reduce(together, group=parallel.group)
        total, *parts = together.split([1, *(gradient.numel() for gradient in gradients.values())])
        gradients = {name: part.view_as(gradients[name]) for name, part in zip(gradients, parts, strict=True)}
    return _logits(model, batch, lengths, parallel), float(total), gradients


@torch.no_grad()
def _logits(
    model: PreTrainedModel, batch: Batch, lengths: Sequence[int], parallel: SequenceParallel | None
) -> list[Tensor]:
    """Of each sample, the same on all ranks."""
    sequence = model(**batch.model_inputs()).logits[0]
    assert isinstance(batch, PackedBatch | ShardedBatch)
    if parallel is not None:
        sequence = parallel.gather(sequence, batch.index, sum(batch.lengths))
    starts = np.cumsum([0, *batch.lengths]).tolist()
    return [sequence[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _changed(batch: ShardedBatch, samples: Sequence[EncodedSample], changed_sample: int) -> ShardedBatch:
    """The same sequence with another last token in one sample."""
    at = sum(batch.lengths[:changed_sample]) + samples[changed_sample].length - 2
    ids = batch.input_ids.clone()
    ids[0, batch.index == at] += 1
    return dataclasses.replace(batch, input_ids=ids)


def _difference(actual: Tensor, expected: Tensor) -> float:
    if not actual.numel():
        return 0.0
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1.0)
