"""A reduced model of each family on a sequence that ranks share, against the same sequence on one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import set_attention
from packtool.batch.batch import Batch, ShardedBatch
from packtool.batch.collate import collate_packs
from packtool.batch.collate_shard import collate_shard
from packtool.batch.spec import InputSpec
from packtool.plan.skrull import SHARDED
from packtool.train.model.loss import sum_of_losses, takes_logits_to_keep
from tests.batch.reduced import TEXT_MODELS, mixed_samples, reduced_model, reduced_spec, save_image_processor


def check_model(name: str, parallel: SequenceParallel) -> list[float]:
    """Largest differences of logits, loss and parameter gradients: all samples sharded, then some of them local.

    The last number is how far the logits of other samples move when one is changed.
    """
    with tempfile.TemporaryDirectory() as directory:
        if name not in TEXT_MODELS:
            save_image_processor(name, directory)
        spec, model = reduced_spec(name, directory), reduced_model(name)
        samples = mixed_samples(name)
        whole = collate_packs(samples, spec)
        logits, loss, gradients = _run(model, whole, [sample.length for sample in samples], None)
        set_attention(model, "auto", parallel)
        errors = [0.0, 0.0, 0.0, 0.0]
        local = [number % parallel.cut.size if number % 3 else SHARDED for number in range(len(samples))]
        for places in ([SHARDED] * len(samples), local):
            batch = collate_shard(samples, spec, parallel.cut, places)
            lengths = [sample.length for sample in samples]
            other, its_loss, its_gradients = _run(model, batch, lengths, parallel)
            errors[0] = max(errors[0], *map(_difference, other, logits))
            errors[1] = max(errors[1], abs(its_loss - loss) / max(abs(loss), 1.0))
            errors[2] = max(errors[2], *(_difference(its_gradients[key], gradients[key]) for key in gradients))
            changed = _changed(samples, spec, parallel, places, number=2)
            moved = _run(model, changed, lengths, parallel)[0]
            assert _difference(moved[2], other[2]) > 1e-3, "the change was felt"
            errors[3] = max(errors[3], *(_difference(moved[i], other[i]) for i in range(len(samples)) if i != 2))
        return errors


def _run(
    model: PreTrainedModel, batch: Batch, lengths: Sequence[int], parallel: SequenceParallel | None
) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """Logits of each sample, the sum of losses and all gradients, the same on all ranks."""
    model.zero_grad(set_to_none=True)
    loss = sum_of_losses(model, batch, label_logits_only=takes_logits_to_keep(model))
    torch.autograd.backward(loss)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    total = loss.detach().clone()
    with torch.no_grad():
        sequence = model(**batch.model_inputs()).logits[0]
    if parallel is not None:
        assert isinstance(batch, ShardedBatch)
        for gradient in (total, *gradients.values()):
            dist.all_reduce(gradient, group=parallel.whole)
        sequence = parallel.gathered(sequence, batch.index, sum(batch.lengths))
    starts = [0]
    for length in batch.lengths:  # type: ignore[attr-defined]  # both kinds of packed sequences have them
        starts.append(starts[-1] + length)
    found = [sequence[start : start + length] for start, length in zip(starts, lengths, strict=False)]
    return found, float(total), gradients


def _changed(
    samples: list, spec: InputSpec, parallel: SequenceParallel, places: list[int], number: int
) -> ShardedBatch:
    """The same sequence with another last token in one sample."""
    batch = collate_shard(samples, spec, parallel.cut, places)
    at = sum(batch.lengths[:number]) + samples[number].length - 2
    batch.input_ids[0, batch.index == at] += 1
    return batch


def _difference(found: Tensor, wanted: Tensor) -> float:
    if not found.numel():
        return 0.0
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1.0)
