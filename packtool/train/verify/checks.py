"""Whether a packed sample computes what it computes alone: four comparisons on one pack, and a fifth on a tree.

*isolation*: one sample's tokens and media are changed, in place; no other sample's logits may move.
*prefixes*: what several samples begin with is changed; the logits of these are those of each sample alone with the same
change.
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
from packtool.batch.prefix_tree import Node
from packtool.errors import MismatchError
from packtool.train.verify.pack_under_test import PackUnderTest

_SMALL_GRADIENT = 1e-3
"""Gradients whose norm is below this share of the largest are compared as if it were of that size."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name: ``isolation``, ``prefixes``, ``logits``, ``loss`` or ``gradients``; of a trajectory ``losses`` or
            ``weights``.
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
        if self.name == "prefixes":
            return f"a shared prefix does not do what it does alone: {self.where} the difference is {size}"
        if self.name in ("losses", "weights"):
            return f"packed steps do not train what unpacked ones do: {self.where} the difference is {size}"
        thing = "the loss of a pack is" if self.name == "loss" else f"the {self.name} of a pack are"
        return f"{thing} not that of its samples alone: {self.where} the difference is {size}"


@torch.no_grad()
def check_isolation(pack: PackUnderTest, most: int = 8) -> Check:
    """Change one sample after the other, of a tree one node after the other, and see which others move.

    Args:
        most: samples to change, spread over the pack, the first among them: what comes first is what can leak.

    Raises:
        MismatchError: if a change does not even move its own sample: nothing could be told.
    """
    before = pack.packed_logits(pack.batch)
    allowed = pack.tolerances.isolation * _unit(before)
    worst, was_felt = Check("isolation", 0.0, allowed, "no change moved another sample"), False
    # What all samples have moves all of them.
    told = [node for node in pack.nodes if len(node.samples) < len(pack.samples)]
    for changed in _spread(told, most):
        after = pack.packed_logits(pack.with_change(changed))
        moved = [_difference(a, b) for a, b in zip(after, before, strict=True)]
        was_felt |= not all(moved[number] <= allowed for number in changed.samples)
        for number, error in enumerate(moved):
            if number not in changed.samples and not error <= worst.error:
                where = f"a change of {pack.node_name(changed)} moved {pack.name(number)}"
                worst = Check("isolation", error, allowed, where)
    if told and not was_felt:
        raise MismatchError(
            "changing a sample's tokens does not change what the model says of it: nothing can be verified",
            "Check that --model is a trained model, and not one of zeros.",
        )
    return worst


@torch.no_grad()
def check_prefixes(pack: PackUnderTest, most: int = 4) -> Check:
    """Change one shared prefix after the other: its samples' logits are then those of the samples alone, so changed.

    Args:
        most: prefixes to change, spread over the pack.
    """
    worst = Check("prefixes", 0.0, pack.tolerances.logits, "no prefix did anything else")
    for changed in _spread([node for node in pack.nodes if node.is_shared], most):
        packed = pack.packed_logits(pack.with_change(changed))
        with _as_transformers_does(pack.model):
            alone = {number: pack.logits_alone(number, changed) for number in changed.samples}
        allowed = pack.tolerances.logits * _unit(list(alone.values()))
        for number, logits in alone.items():
            error = _difference(packed[number], logits)
            if not error / allowed <= worst.error / worst.allowed:
                where = f"after a change of {pack.node_name(changed)} in {pack.name(number)}"
                worst = Check("prefixes", error, allowed, where)
    return worst


@torch.no_grad()
def check_logits(pack: PackUnderTest) -> Check:
    """Compare the logits of each sample in the pack with its logits alone."""
    packed = pack.packed_logits(pack.batch)
    with _as_transformers_does(pack.model):
        alone = [pack.logits_alone(number) for number in range(len(pack.samples))]
    errors = [_difference(a, b) for a, b in zip(packed, alone, strict=True)]
    worst = max(range(len(errors)), key=lambda number: _as_key(errors[number]))
    return Check("logits", errors[worst], pack.tolerances.logits * _unit(alone), f"in {pack.name(worst)}")


@torch.no_grad()
def check_loss(pack: PackUnderTest) -> Check:
    """The pack's mean loss over its targets against the same mean over the samples alone."""
    packed = pack.packed_loss()
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
    pack.take_packed_gradients()
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
def without_dropout(model: nn.Module) -> Iterator[None]:
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


def _spread(nodes: Sequence[Node], most: int) -> list[Node]:
    """At most so many of some nodes, the first and the last among them."""
    chosen = np.linspace(0, len(nodes) - 1, min(most, len(nodes))).round().astype(int)
    return [nodes[number] for number in chosen.tolist()]


def _unit(logits: Sequence[Tensor]) -> float:
    """The largest logit, at least 1."""
    return max([1.0, *(float(tensor.abs().max()) for tensor in logits if tensor.numel())])


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def _as_key(error: float) -> float:
    return math.inf if math.isnan(error) else error


def raise_if_failed(checks: Sequence[Check], *, shares: bool = False) -> None:
    """Raise if packed samples are not what they are alone.

    Args:
        shares: the samples share a prefix.

    Raises:
        MismatchError: naming every check that failed, the sample or parameter, and both numbers.
    """
    failed = [check.sentence() for check in checks if not check.passed]
    if failed:
        instead = "--share-prefix false or " if shares else ""
        raise MismatchError(
            "\n".join(failed),
            f"Train with {instead}--packing false, or try --attn-impl sdpa. If sdpa fails, too, please report the "
            "model's name.",
        )
