"""What ``bench_gpu.py`` checks before it measures: kernels against the reference, packs against samples alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from packtool.attention.choose import KERNELS
from packtool.attention.flash import FlashKernel
from packtool.attention.kernel import Varlen
from packtool.attention.register import GatherTokens, set_attention
from packtool.batch.batch import Batch
from packtool.constants import IGNORE_INDEX
from packtool.train.model.loss import HeadLoss
from scripts._gpu_models import (
    NUM_CONTROL,
    SIZES,
    Sample,
    make_model,
    make_samples,
    pack,
    pad,
    text_config,
    vision_config,
)

LENGTHS = (1, 63, 64, 65, 2, 128, 300)
HEADS = ((8, 2, 128), (4, 4, 64))
ROUNDINGS = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
"""Largest error of a kernel in units of the largest value, at least 1."""

ALLOWED_RATIO = 4.0
"""How many times further than transformers' own rounding a pack may be from the exact result."""


@dataclass(frozen=True)
class Check:
    """A comparison of two results.

    Args:
        kernel: that is checked, or "" for what has nothing to do with one.
        error: may be at most ``allowed``.
        note: why there is no error to compare.
    """

    kernel: str
    name: str
    error: float
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; one that is NaN never is."""
        return self.error <= self.allowed


def work_type(device: torch.device) -> torch.dtype:
    """What is measured: bfloat16 on a GPU; float32 on a CPU, where only checks count."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def kernels_at_hand(device: torch.device) -> tuple[list[str], dict[str, str]]:
    """Kernels that run here without a download, and why the others do not; the reference is none of either."""
    there, missing = [], {}
    for name, kernel in KERNELS.items():
        problem = kernel.availability_error(device, work_type(device))
        if problem is not None:
            missing[name] = problem.message
        elif isinstance(kernel, FlashKernel) and not kernel.is_available():
            missing[name] = "it is not installed, and the hub's has not been downloaded"
        elif name != "reference":
            there.append(name)
    return there, missing


def run_checks(kernels: list[str], device: torch.device) -> Iterator[Check]:
    """All of them, one by one."""
    for name in kernels:
        for heads in HEADS:
            label = f"{name}: out and gradients, {heads[0]}/{heads[1]} heads of {heads[2]}"
            yield from _attempt(name, label, partial(_kernel_error, name, heads, device))
    yield from _attempt("", "shared prefixes: gradients of 16 branches, two runs", partial(_repeated_error, device))
    for sees in (False, True):
        yield from _check_model(kernels, device, sees=sees)


def _repeated_error(device: torch.device) -> tuple[float, float]:
    """Largest difference between five backward passes of a prefix that 16 branches use, which must be bit-identical."""
    index = torch.arange(512, device=device).repeat(16)
    tokens = torch.randn(512, 8, 128, device=device, dtype=work_type(device), requires_grad=True)
    weights = torch.randn(len(index), 8, 128, device=device, dtype=work_type(device))
    runs = [torch.autograd.grad(GatherTokens.apply(index, tokens), tokens, (weights,))[0] for _ in range(5)]
    return max(_worst(run, runs[0]) for run in runs), 0.0


def _attempt(kernel: str, label: str, compare: Callable[[], tuple[float, float]]) -> Iterator[Check]:
    """(error, allowed) of a comparison; what does not run must not keep the rest from being checked."""
    try:
        yield Check(kernel, label, *compare())
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        yield Check(kernel, label, math.nan, math.nan, f"{type(error).__name__}: {first[:90]}")


def _kernel_error(name: str, heads: tuple[int, int, int], device: torch.device) -> tuple[float, float]:
    """Forward and backward against float64 on the same, already rounded, numbers."""
    dtype = work_type(device)
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads, head_dim = heads
    shapes = [(sum(LENGTHS), number, head_dim) for number in (num_heads, num_kv_heads, num_kv_heads)]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]
    weight = torch.randn(shapes[0], generator=generator).to(device, dtype)
    varlen = Varlen.of_lengths(LENGTHS, device)
    found, expected = (_out_and_gradients(kernel, inputs, weight, varlen) for kernel in (name, "reference"))
    errors = [float((a - b).abs().max() / max(1.0, float(b.abs().max()))) for a, b in zip(found, expected, strict=True)]
    return max(errors), ROUNDINGS[dtype]


def _out_and_gradients(name: str, inputs: list[Tensor], weight: Tensor, varlen: Varlen) -> list[Tensor]:
    out = KERNELS[name].attend(*inputs, varlen)
    gradients = torch.autograd.grad((out.double() * weight.double()).sum(), inputs)
    return [tensor.detach().double() for tensor in (out, *gradients)]


def _check_model(kernels: list[str], device: torch.device, *, sees: bool) -> Iterator[Check]:
    """A tiny model's packs against each sample alone, as transformers computes it, in a wider type."""
    wide, narrow = (torch.float64, torch.float32) if device.type == "cpu" else (torch.float32, torch.bfloat16)
    kind = "Qwen3-VL" if sees else "text"
    size = SIZES["tiny"]
    config = vision_config(size) if sees else text_config(size)
    exact = make_model(config, device, wide)
    # Weights of a fresh model are so small that what it attends to hardly matters.
    for parameter in (each for each in exact.parameters() if each.ndim > 1):
        torch.nn.init.normal_(parameter, std=0.1)
    samples = make_samples((70, 9, 120, 33), config, device, picture_side=8 if sees else 0)
    model = copy.deepcopy(exact).to(narrow)
    right = _alone(exact, samples)
    own = _worst(_alone(model, samples), right)
    del exact
    other = _changed(samples[0], size.text["vocab_size"])
    batch, changed = (pack([first, *samples[1:]], config) for first in (samples[0], other))

    def rounding(name: str) -> tuple[float, float]:
        set_attention(model, name)
        return _worst(_logits(model, batch)[0], right) / own, ALLOWED_RATIO

    def leak(name: str) -> tuple[float, float]:
        set_attention(model, name)
        before, after = (_logits(model, each)[0, samples[0].length :] for each in (batch, changed))
        return _worst(after, before) / float(before.abs().max()), 1e-6 if narrow == torch.float32 else 1e-2

    for name in kernels:
        yield from _attempt(name, f"{kind}, {name}: packed logits, in roundings of the model", partial(rounding, name))
        yield from _attempt(name, f"{kind}, {name}: a changed sample moves no other", partial(leak, name))
    yield from _check_losses(model, samples, kind, kernels[0], config)


def _check_losses(
    model: Any, samples: list[Sample], kind: str, kernel: str, config: PreTrainedConfig
) -> Iterator[Check]:
    """Losses made in the head against those of all logits; padded against packed."""
    allowed = 1e-5 if next(model.parameters()).dtype == torch.float32 else 2e-2
    head, packed, padded = HeadLoss(model), pack(samples, config), pad(samples, sees=hasattr(config, "vision_config"))
    set_attention(model, kernel)
    logits = _logits(model, packed).flatten(0, 1).float()
    plain = F.cross_entropy(logits, packed.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")

    @torch.no_grad()
    def off(batch: Batch) -> tuple[float, float]:
        return abs(float(head.losses(model, batch).weighted_sum() / plain) - 1), allowed

    yield from _attempt("", f"{kind}: losses made in the head", partial(off, packed))
    model.set_attn_implementation("sdpa")
    yield from _attempt("", f"{kind}: loss of padded rows", partial(off, padded))


@torch.no_grad()
def _logits(model: Any, batch: Any) -> Tensor:
    inputs = batch.model_inputs()
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if name == "pixel_values" else value for name, value in inputs.items()}
    logits: Tensor = model(**inputs).logits
    return logits


def _alone(model: Any, samples: list[Sample]) -> Tensor:
    """(T, vocabulary) logits of each sample in a call of its own; the model finds positions by itself."""
    found = []
    for sample in samples:
        inputs: dict[str, Any] = {"input_ids": sample.input_ids[None], "use_cache": False}
        if sample.pixels is not None:
            types = (sample.input_ids == model.config.image_token_id).int()[None]
            pixels = sample.pixels.to(next(model.parameters()).dtype)
            inputs |= {"pixel_values": pixels, "image_grid_thw": sample.grid, "mm_token_type_ids": types}
        with torch.no_grad():
            found.append(model(**inputs).logits[0])
    return torch.cat(found)


def _changed(sample: Sample, vocabulary: int) -> Sample:
    """Other tokens and pixels, the same places."""
    num = vocabulary - NUM_CONTROL
    ids = torch.where(sample.input_ids < num, (sample.input_ids + 7) % num, sample.input_ids)
    return replace(sample, input_ids=ids, pixels=None if sample.pixels is None else -sample.pixels)


def _worst(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())
