"""Check the packing of a run before its first step, at the cost of a few forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.support import refuse_leaky_inputs
from packtool.batch.collate import collate_packs
from packtool.batch.dataset import is_bad
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.progress import Progress
from packtool.train.model.load import resolve_dtype
from packtool.train.model.memory import FEW
from packtool.train.model.sharding import (
    is_zero3,
)
from packtool.train.prepare.run import Run
from packtool.train.verify.checks import (
    Check,
    check_isolation,
    check_loss,
    check_prefixes,
    raise_if_failed,
    without_dropout,
)
from packtool.train.verify.pack_under_test import PackUnderTest

_FEW_TOKENS = 4096
_CHANGES_BEFORE_TRAINING = 2


def verify_before_training(
    run: Run,
    model: nn.Module,
    spec: InputSpec,
    parallel: SequenceParallel | None,
    progress: Progress,
) -> None:
    """Check a few samples of the first pack before the first step.

    Args:
        model: that trains, not yet wrapped for several processes.
        parallel: ranks that share sequences with this one; None for nobody.

    Raises:
        MismatchError: if they do not compute in the pack what they compute alone.
    """
    config, on_gpu = run.config, torch.cuda.is_available()
    if not (config.removes_padding and config.verify_packing):
        return
    if is_zero3(config) or config.shares_experts or (on_gpu and (config.fsdp or config.deepspeed)):
        progress.note("packing is not verified before weights are sharded; packtool verify does it on one device")
        return
    dtype = resolve_dtype(spec.config, config, on_gpu=on_gpu)
    samples = run.source.first_samples(FEW)
    if config.on_bad_media == "skip":
        samples = [sample for sample in samples if not is_bad(sample, spec)]
    samples = fewer_tokens(samples)
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
    """The part that costs a few forward passes, for a run that is about to begin.

    Two samples are changed, and what they share, and the loss is compared, without gradients; neither the model's mode
    nor random numbers are touched. ``raise_if_failed`` turns the answer into an error.

    Args:
        model: that ``set_attention`` was called on; bare or in an adapter, not yet wrapped for several processes.
        samples: at least two, better short ones.
        spec: the model as collation sees it.
        dtype: that the run computes in, if that is not the weights' own: the autocast's.
        parallel: ranks that share sequences; all of them call this with the same samples. Some of them are sharded,
            and others whole on a rank.
        min_shared: tokens that a prefix must have to be computed once; None has all samples whole.

    Returns:
        the checks ``isolation``, ``loss`` and, of a tree, ``prefixes``.

    Raises:
        MismatchError: if the inputs could leak, or changes have no effect.
    """
    weights = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    # Frozen and trained weights may differ.
    kept = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    casts = dtype is not None and kept != {dtype}
    cast = torch.autocast(weights.device.type, dtype) if casts else contextlib.nullcontext()
    with without_dropout(model), torch.no_grad(), cast:
        pack_under_test = PackUnderTest(
            model, samples, spec, dtype or weights.dtype, parallel, some_local=True, min_shared=min_shared
        )
        packed = pack_under_test.batch if parallel is None else collate_packs(pack_under_test.samples, spec)
        refuse_leaky_inputs(packed.model_inputs())
        checks = [check_isolation(pack_under_test, _CHANGES_BEFORE_TRAINING), check_loss(pack_under_test)]
        return [*checks, check_prefixes(pack_under_test, 1)] if pack_under_test.is_tree else checks


def fewer_tokens(samples: Sequence[EncodedSample], most: int = _FEW_TOKENS) -> list[EncodedSample]:
    """The shortest of some samples, in their order, that have together no more tokens; two, whatever their length."""
    shortest = sorted(range(len(samples)), key=lambda number: samples[number].length)
    sums = np.cumsum([samples[number].length for number in shortest])
    kept = set(shortest[: max(int((sums <= most).sum()), 2)])
    return [sample for number, sample in enumerate(samples) if number in kept]
