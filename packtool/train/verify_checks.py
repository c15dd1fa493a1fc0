"""Whether a packed sample computes what it computes alone: four comparisons on one pack.

*isolation*: one sample's tokens and media are changed, in place; no other sample's logits may move.
*logits*, *loss*, *gradients*: those of the pack against those of each sample alone, which transformers computes by
itself: its own attention, its own recurrent layers, no boundaries.

Isolation is the sharp one: the pack keeps its shape, so that what is computed for the other samples is computed in the
same order and should not move in the last bit. Packed and alone differ by rounding, more so in 16 bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packtool.attention.register import own_attention
from packtool.batch.batch import Batch, PackedBatch
from packtool.batch.collate import collate_packs
from packtool.batch.sounds import sounds_in_order
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError
from packtool.train.loss import sum_of_losses, takes_logits_to_keep

_POSITIONS = 32
"""Positions of a sample whose logits are compared; all of a long sample's would need gigabytes."""

_SMALL_GRADIENT = 1e-3
"""Gradients whose norm is below this share of the largest are compared as if it were of that size."""


@dataclass(frozen=True)
class Tolerances:
    """Largest errors that rounding explains.

    Args:
        isolation, logits: in units of the largest logit (at least 1).
        loss: in units of the mean loss (at least 1).
        gradients: norm of the difference, in units of the norm of the same parameter's gradient.
    """

    isolation: float
    logits: float
    loss: float
    gradients: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerances:
        """For weights, or an autocast, of this type."""
        if dtype == torch.bfloat16:
            return cls(isolation=1e-2, logits=5e-2, loss=2e-2, gradients=2e-1)
        if dtype == torch.float16:
            return cls(isolation=2e-3, logits=1e-2, loss=3e-3, gradients=5e-2)
        return cls(isolation=1e-5, logits=1e-4, loss=1e-5, gradients=2e-3)


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name: ``isolation``, ``logits``, ``loss`` or ``gradients``.
        error: the largest that was found.
        allowed: the largest that rounding explains.
        where: it was found.
    """

    name: str
    error: float
    allowed: float
    where: str

    @property
    def passed(self) -> bool:
        """Never for an error that is no number."""
        return self.error <= self.allowed

    @property
    def excess(self) -> float:
        """Error in units of what is allowed."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed

    def sentence(self) -> str:
        """What it means that it failed."""
        size = f"{self.error:.2g}, and rounding explains {self.allowed:.2g}"
        if self.name == "isolation":
            return f"packed samples leak: {self.where} by {size}"
        thing = "the loss of a pack is" if self.name == "loss" else f"the {self.name} of a pack are"
        return f"{thing} not that of its samples alone: {self.where} the difference is {size}"


class PackUnderTest:
    """Samples in one packed row and each alone, on the model's device.

    Args:
        model: bare or in an adapter.
        samples: at least two.
        spec: the model as collation sees it.
        dtype: that the model computes in.
    """

    def __init__(self, model: nn.Module, samples: Sequence[EncodedSample], spec: InputSpec, dtype: torch.dtype) -> None:
        device = next(model.parameters()).device
        self.model = model
        self.dtype = dtype
        self.samples = list(samples)
        self.spec = spec
        self.tolerances = Tolerances.of(dtype)
        self.batch = collate_packs(self.samples, spec).to(device)
        self.alone = [_without_boundaries(collate_packs([sample], spec).to(device)) for sample in self.samples]
        self.label_logits_only = takes_logits_to_keep(model)
        # A filler document behind the last sample is nobody's.
        self.lengths = self.batch.lengths[: len(self.samples)]
        self.starts = [0, *np.cumsum(self.lengths).tolist()][: len(self.samples)]
        self.num_targets = max(self.batch.num_target_tokens, 1)

    def first(self, most: int) -> PackUnderTest:
        """A pack of its first samples."""
        if len(self.samples) <= most:
            return self
        return PackUnderTest(self.model, self.samples[:most], self.spec, self.dtype)

    def name(self, number: int) -> str:
        """A sample of the pack, as a person finds it."""
        sample = self.samples[number]
        return f"sample {number} ({sample.source}, row {sample.row})"

    def packed_logits(self, batch: PackedBatch) -> list[Tensor]:
        """Of some positions of every sample: float32 (P, vocabulary) each."""
        found = [_positions(length) for length in self.lengths]
        rows = [positions + start for positions, start in zip(found, self.starts, strict=True)]
        logits = _logits(self.model, batch, torch.cat(rows))
        return list(torch.split(logits, [len(positions) for positions in found]))

    def logits_alone(self, number: int) -> Tensor:
        """The same of one sample, alone."""
        return _logits(self.model, self.alone[number], _positions(self.lengths[number]))

    def loss(self, batch: Batch) -> Tensor:
        """A batch's share of the pack's mean loss."""
        return sum_of_losses(self.model, batch, label_logits_only=self.label_logits_only) / self.num_targets


@torch.no_grad()
def check_isolation(pack: PackUnderTest, most: int = 8) -> Check:
    """Change one sample after the other, and see which move.

    Args:
        most: samples to change, spread over the pack, the first among them: what comes first is what can leak.

    Raises:
        MismatchError: if a change does not even move its own sample: nothing could be told.
    """
    before = pack.packed_logits(pack.batch)
    allowed = pack.tolerances.isolation * _unit(before)
    worst, was_felt = Check("isolation", 0.0, allowed, "no change moved another sample"), False
    count = min(most, len(pack.samples))
    for changed in np.linspace(0, len(pack.samples) - 1, count).round().astype(int).tolist():
        after = pack.packed_logits(_with_change(pack, changed))
        moved = [_difference(a, b) for a, b in zip(after, before, strict=True)]
        was_felt |= not moved[changed] <= allowed
        for number, error in enumerate(moved):
            if number != changed and not error <= worst.error:
                where = f"a change of {pack.name(changed)} moved {pack.name(number)}"
                worst = Check("isolation", error, allowed, where)
    if not was_felt:
        raise MismatchError(
            "changing a sample's tokens does not change what the model says of it: nothing can be verified",
            "Check that --model is a trained model, and not one of zeros.",
        )
    return worst


@torch.no_grad()
def check_logits(pack: PackUnderTest) -> Check:
    """Packed against alone."""
    packed = pack.packed_logits(pack.batch)
    with _as_transformers_does(pack.model):
        alone = [pack.logits_alone(number) for number in range(len(pack.samples))]
    errors = [_difference(a, b) for a, b in zip(packed, alone, strict=True)]
    worst = max(range(len(errors)), key=lambda number: _as_key(errors[number]))
    return Check("logits", errors[worst], pack.tolerances.logits * _unit(alone), f"in {pack.name(worst)}")


@torch.no_grad()
def check_loss(pack: PackUnderTest) -> Check:
    """The pack's mean loss over its targets against the same mean over the samples alone."""
    packed = float(pack.loss(pack.batch))
    with _as_transformers_does(pack.model):
        alone = sum(float(pack.loss(batch)) for batch in pack.alone)
    where = f"of {pack.num_targets:,} targets, {packed:.6g} packed and {alone:.6g} alone:"
    return Check("loss", abs(packed - alone), pack.tolerances.loss * max(1.0, abs(alone)), where)


def check_gradients(pack: PackUnderTest, most: int = 8) -> Check:
    """The gradient of the pack's loss against the sum over its samples; needs the memory of one more model.

    The gradients of the samples are added up, then those of the pack are taken away: what is left is the error.

    Args:
        most: samples to pack, the first ones; in 16 bits the rounding of many sums would hide a leak.
    """
    pack = pack.first(most)
    pack.model.zero_grad(set_to_none=True)
    with _as_transformers_does(pack.model):
        for batch in pack.alone:
            torch.autograd.backward(pack.loss(batch))
    sizes = {name: float(p.grad.float().norm()) for name, p in pack.model.named_parameters() if p.grad is not None}
    least = _SMALL_GRADIENT * max(sizes.values(), default=0.0) or 1.0
    torch.autograd.backward(-pack.loss(pack.batch))
    worst = Check("gradients", 0.0, pack.tolerances.gradients, "nowhere")
    for name, parameter in pack.model.named_parameters():
        if parameter.grad is not None:
            error = float(parameter.grad.float().norm()) / max(sizes.get(name, 0.0), least)
            if not error <= worst.error:
                worst = dataclasses.replace(worst, error=error, where=f"in {name}")
    pack.model.zero_grad(set_to_none=True)
    return worst


def worst_of(checks: Sequence[Check]) -> list[Check]:
    """The worst of each name, in the order in which the names first come."""
    names = dict.fromkeys(check.name for check in checks)
    return [max((check for check in checks if check.name == name), key=lambda check: check.excess) for name in names]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped; afterwards every module trains or not, as before."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _as_transformers_does(model: Any) -> Iterator[None]:
    with own_attention(model.get_base_model() if hasattr(model, "get_base_model") else model):
        yield


def _without_boundaries(batch: PackedBatch) -> Batch:
    """A batch of one sample as if packing had never been thought of."""
    return Batch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)})


def _positions(length: int) -> Tensor:
    """int64 (P,) of a sample: its first ones, where a leak is largest, and others up to its end."""
    if length <= _POSITIONS:
        return torch.arange(length)
    half = _POSITIONS // 2
    return torch.cat([torch.arange(half), torch.linspace(half, length - 1, half).long()])


def _logits(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """float32 (P, vocabulary), on the host."""
    inputs = batch.model_inputs()
    positions = positions.to(batch.input_ids.device)
    if takes_logits_to_keep(model):
        logits = model(**inputs, logits_to_keep=positions).logits[0]
    else:
        logits = model(**inputs).logits[0, positions]
    return logits.float().cpu()


def _with_change(pack: PackUnderTest, number: int) -> PackedBatch:
    """The pack with other tokens and media in one sample, in the same places."""
    ids = pack.batch.input_ids.clone()
    kept = torch.tensor(sorted(_token_ids(pack.spec.config)), device=ids.device)
    start = pack.starts[number]
    own = ids[0, start : start + pack.lengths[number]]
    words = own[~torch.isin(own, kept)]
    # Every token becomes the next larger one of the pack: tokens that the model knows, and none of the media's.
    known = torch.unique(ids[~torch.isin(ids, kept)])
    if len(known) == 1:
        known = torch.unique(torch.cat([known, torch.where(known > 0, known - 1, known + 1)]))
    own[~torch.isin(own, kept)] = known[(torch.searchsorted(known, words) + 1) % len(known)]
    media = {name: _flipped(tensor, name, pack, number) for name, tensor in pack.batch.media.items()}
    return dataclasses.replace(pack.batch, input_ids=ids, media=media)


def _flipped(tensor: Tensor, name: str, pack: PackUnderTest, number: int) -> Tensor:
    """What a tower takes, with the rows of one sample's media negated."""
    counts = [_num_rows(sample, name, pack.spec) for sample in pack.samples]
    start = sum(counts[:number])
    signs = torch.ones(len(tensor), device=tensor.device)
    signs[start : start + counts[number]] = -1
    return tensor * signs.to(tensor.dtype).reshape(-1, *[1] * (tensor.ndim - 1)) if counts[number] else tensor


def _num_rows(sample: EncodedSample, name: str, spec: InputSpec) -> int:
    """Rows of a tower's input that belong to a sample; 0 for what says where they are."""
    if name == "pixel_values":
        return sum(math.prod(image.grid) for image in sample.images)
    if name == "pixel_values_videos":
        return sum(math.prod(video.grid) for video in sample.videos)
    return len(sounds_in_order(sample, spec)) if name == "input_features" else 0


def _token_ids(config: Any) -> set[int]:
    """Tokens that a configuration names: they open, close and stand for media."""
    return {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }


def _unit(logits: Sequence[Tensor]) -> float:
    """The largest logit, at least 1."""
    return max([1.0, *(float(tensor.abs().max()) for tensor in logits if tensor.numel())])


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def _as_key(error: float) -> float:
    return math.inf if math.isnan(error) else error
