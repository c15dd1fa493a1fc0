"""Comparisons of packed samples with the same samples alone: four on any pack, and a fifth on a prefix tree.

*isolation*: one sample's tokens and media are changed in place; no other sample's logits may change.
*prefixes*: a prefix that several samples share is changed; their logits must equal those of each sample alone with the
same change.
*logits*, *loss*, *gradients*: those of the pack against those of each sample alone, computed by transformers itself:
its own attention, its own recurrent layers, no boundaries.

Isolation is the strictest: the pack keeps its shape, so the other samples are computed in the same order and should not
differ in the last bit. Packed and alone differ by rounding, more so in 16 bits. Before its first step, a run makes the
comparisons that cost only a few forward passes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import own_attention
from packtool.attention.support import refuse_leaky_inputs
from packtool.batch.collate import collate_packs
from packtool.batch.dataset import sample_media_error
from packtool.batch.prefix_tree import Node
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError
from packtool.progress import Progress
from packtool.train.model.load import resolve_dtype
from packtool.train.model.memory import MAX_CHECKED_SAMPLES
from packtool.train.model.sharding import zero_stage
from packtool.train.model.towers import base_model, without_dropout
from packtool.train.prepare.run import Run
from packtool.train.verify.pack_under_test import PackUnderTest

_MAX_TOKENS = 4096
_MAX_CHANGES = 2
_MIN_GRADIENT = 1e-3
"""Gradients whose norm is below this share of the largest are compared as if they had that norm."""


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name: ``isolation``, ``prefixes``, ``logits``, ``loss`` or ``gradients``; of a trajectory ``losses`` or
            ``weights``.
        error: the largest error.
        allowed: the largest error that rounding explains.
        where: place of the largest error, in words.
    """

    name: str
    error: float
    allowed: float
    where: str

    @property
    def passed(self) -> bool:
        """True if the error is allowed; NaN never is."""
        return self.error <= self.allowed

    @property
    def excess(self) -> float:
        """The error relative to the allowed one; infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed

    def sentence(self) -> str:
        """Describe a failed check."""
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
def check_isolation(pack: PackUnderTest, max_changes: int = 8) -> Check:
    """Change one sample after the other, in a tree one node after the other, and compare the logits of all others.

    Args:
        max_changes: changes, spread over the pack; always includes the first sample, which can leak into all others.

    Raises:
        MismatchError: if no change affects even its own sample, so that nothing can be verified.
    """
    before = pack.packed_logits(pack.batch)
    allowed = pack.tolerances["isolation"] * _unit(before)
    checks, has_effect = [Check("isolation", 0.0, allowed, "no change moved another sample")], False
    # A node that all samples share changes all of them.
    nodes = [node for node in pack.nodes if len(node.samples) < len(pack.samples)]
    for changed in _spread(nodes, max_changes):
        after = pack.packed_logits(pack.with_change(changed))
        for number, error in enumerate(map(_difference, after, before)):
            if number in changed.samples:
                has_effect |= not error <= allowed  # NaN is an effect
            else:
                where = f"a change of {pack.node_name(changed)} moved {pack.name(number)}"
                checks.append(Check("isolation", error, allowed, where))
    if nodes and not has_effect:
        raise MismatchError(
            "changing a sample's tokens does not change what the model says of it: nothing can be verified",
            "Check that --model is a trained model, and not one of zeros.",
        )
    return worst_of(checks)[0]


@torch.no_grad()
def check_prefixes(pack: PackUnderTest, max_changes: int = 4) -> Check:
    """Change one shared prefix after the other, and compare its samples with the same samples alone."""
    checks = [Check("prefixes", 0.0, pack.tolerances["logits"], "no prefix did anything else")]
    for changed in _spread([node for node in pack.nodes if node.is_shared], max_changes):
        packed = pack.packed_logits(pack.with_change(changed))
        with own_attention(base_model(pack.model)):
            alone = {number: pack.logits_alone(number, changed) for number in changed.samples}
        allowed = pack.tolerances["logits"] * _unit(list(alone.values()))
        for number, logits in alone.items():
            where = f"after a change of {pack.node_name(changed)} in {pack.name(number)}"
            checks.append(Check("prefixes", _difference(packed[number], logits), allowed, where))
    return worst_of(checks)[0]


@torch.no_grad()
def check_logits(pack: PackUnderTest) -> Check:
    """Compare the logits of each sample in the pack with its logits alone."""
    packed = pack.packed_logits(pack.batch)
    with own_attention(base_model(pack.model)):
        alone = [pack.logits_alone(number) for number in range(len(pack.samples))]
    allowed, errors = pack.tolerances["logits"] * _unit(alone), map(_difference, packed, alone)
    return worst_of([Check("logits", error, allowed, f"in {pack.name(n)}") for n, error in enumerate(errors)])[0]


@torch.no_grad()
def check_loss(pack: PackUnderTest) -> Check:
    """Compare the pack's mean loss over its targets with the same mean over the samples alone."""
    packed = pack.packed_loss()
    with own_attention(base_model(pack.model)):
        alone = sum(float(pack.loss(batch)) for batch in pack.alone)
    where = f"of {pack.num_targets:,} targets, {packed:.6g} packed and {alone:.6g} alone:"
    return Check("loss", abs(packed - alone), pack.tolerances["loss"] * max(1.0, abs(alone)), where)


def check_gradients(pack: PackUnderTest, max_samples: int = 8) -> Check:
    """Compare the gradient of the pack's loss with the sum over its samples alone; needs memory for one more model.

    The gradients of the samples are added up and those of the pack subtracted; the rest is the error.

    Args:
        max_samples: samples to pack, the first ones; in 16 bits the rounding of many sums would hide a leak.
    """
    pack = pack.first(max_samples)
    pack.model.zero_grad(set_to_none=True)
    with own_attention(base_model(pack.model)):
        for batch in pack.alone:
            torch.autograd.backward(pack.loss(batch))
    norms = {name: float(p.grad.float().norm()) for name, p in pack.model.named_parameters() if p.grad is not None}
    min_norm = _MIN_GRADIENT * max(norms.values(), default=0.0) or 1.0
    pack.subtract_packed_gradients()
    checks = [Check("gradients", 0.0, pack.tolerances["gradients"], "nowhere")]
    for name, parameter in pack.model.named_parameters():
        if parameter.grad is not None:
            error = float(parameter.grad.float().norm()) / max(norms.get(name, 0.0), min_norm)
            checks.append(Check("gradients", error, checks[0].allowed, f"in {name}"))
    pack.model.zero_grad(set_to_none=True)
    return worst_of(checks)[0]


def worst_of(checks: Sequence[Check]) -> list[Check]:
    """Return the worst check of each name, in the order in which the names first appear."""
    names = dict.fromkeys(check.name for check in checks)
    return [max((check for check in checks if check.name == name), key=lambda check: check.excess) for name in names]


def raise_if_failed(checks: Sequence[Check], *, shares: bool = False) -> None:
    """Raise a MismatchError that names every failed check with its sample or parameter and its error.

    Args:
        shares: the samples share a prefix.
    """
    if failures := [check.sentence() for check in checks if not check.passed]:
        instead = "--share-prefix false or " if shares else ""
        raise MismatchError(
            "\n".join(failures),
            f"Train with {instead}--packing false, or try --attn-impl sdpa. If sdpa fails, too, please report the "
            "model's name.",
        )


def _spread(nodes: Sequence[Node], max_nodes: int) -> list[Node]:
    """Return at most ``max_nodes`` nodes, with the first and the last among them."""
    chosen = np.linspace(0, len(nodes) - 1, min(max_nodes, len(nodes))).round().astype(int)
    return [nodes[number] for number in chosen.tolist()]


def _unit(logits: Sequence[Tensor]) -> float:
    """Return the largest absolute logit, at least 1."""
    return max([1.0, *(float(tensor.abs().max()) for tensor in logits if tensor.numel())])


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def verify_before_training(
    run: Run, model: nn.Module, spec: InputSpec, parallel: SequenceParallel | None, progress: Progress
) -> None:
    """Check a few samples of the first pack before the first step; raise a MismatchError if a check fails.

    Args:
        model: to be trained, not yet wrapped for several processes.
        parallel: ranks that share sequences with this one; None without sequence parallelism.
    """
    config, on_gpu = run.config, torch.cuda.is_available()
    if not (config.removes_padding and config.verify_packing):
        return
    shards = config.shares_experts or zero_stage(config) == 3
    if shards or (on_gpu and (config.fsdp or config.deepspeed)):
        progress.note("packing is not verified before weights are sharded; packtool verify does it on one device")
        return
    dtype = resolve_dtype(spec.config, config, on_gpu=on_gpu)
    samples = run.source.first_samples(MAX_CHECKED_SAMPLES)
    if config.on_bad_media == "skip":
        samples = [sample for sample in samples if sample_media_error(sample, spec) is None]
    samples = shortest_samples(samples)
    if len(samples) > 1:
        min_shared = run.source.min_shared
        checks = verify_cheaply(model, samples, spec, dtype=dtype, parallel=parallel, min_shared=min_shared)
        raise_if_failed(checks, shares=min_shared is not None)


def verify_cheaply(
    model: nn.Module,
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    *,
    dtype: torch.dtype | None = None,
    parallel: SequenceParallel | None = None,
    min_shared: int | None = None,
) -> list[Check]:
    """Run the checks that need only a few forward passes and no gradients.

    Changes two samples and one shared prefix, and compares the loss. The model's mode and random numbers are unchanged.

    Args:
        model: routed through packed attention; bare or in an adapter, not yet wrapped for several processes.
        samples: at least two, better short ones.
        dtype: of the computation, if autocast makes it differ from the weights'.
        parallel: ranks that share sequences, which all call this with the same samples; some samples are sharded,
            others local to one rank.
        min_shared: minimum tokens of a shared prefix that is computed once; None shares nothing.

    Returns:
        the checks ``isolation``, ``loss`` and, of a tree, ``prefixes``.
    """
    weights = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    # Frozen and trained weights may differ.
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    casts = dtype is not None and dtypes != {dtype}
    autocast = torch.autocast(weights.device.type, dtype) if casts else contextlib.nullcontext()
    with without_dropout(model), torch.no_grad(), autocast:
        pack = PackUnderTest(
            model, samples, spec, dtype or weights.dtype, parallel, some_local=True, min_shared=min_shared
        )
        packed = pack.batch if parallel is None else collate_packs(pack.samples, spec)
        refuse_leaky_inputs(packed.model_inputs())
        checks = [check_isolation(pack, _MAX_CHANGES), check_loss(pack)]
        return [*checks, check_prefixes(pack, 1)] if pack.is_tree else checks


def shortest_samples(samples: Sequence[EncodedSample], max_tokens: int = _MAX_TOKENS) -> list[EncodedSample]:
    """Return the shortest samples with at most ``max_tokens`` together, in their order; at least two."""
    kept, num_tokens = set[int](), 0
    for number in sorted(range(len(samples)), key=lambda number: samples[number].length):
        num_tokens += samples[number].length
        if num_tokens <= max_tokens or len(kept) < 2:
            kept.add(number)
    return [sample for number, sample in enumerate(samples) if number in kept]
