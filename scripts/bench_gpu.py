#!/usr/bin/env python3
"""Measure packed attention and packed training steps on one CUDA GPU. Checks come first, then one table.

Needs only torch and transformers, and no data: weights and samples are random, in bfloat16.

- attention: every available kernel on documents of several lengths, forward and backward. The baseline is torch's dense
  causal attention with the same tokens and FLOPs (rows of one length with the same sum of squared lengths).
- text, vision: training steps (forward, backward, AdamW) of the text tower of a Qwen3-VL, and of the whole model with
  pictures. The same samples are packed into one row, with every kernel, or padded in micro-batches of ``--rows``, in
  order or grouped by length. Padded batches use transformers' SDPA.

TFLOP/s and MFU count the matrix products of sample tokens, with a backward pass of twice the forward pass, from the
model's sizes (``packtool.planning.cost``). They count neither padding nor recomputed activations. Times are medians
over ``--repeats`` steps between CUDA events, after a warm-up. Rows that do not fit are printed as "out of memory".

The memory of a packed step is also estimated in advance, as by ``packtool train``: from a trace of the same model
without data (this needs peft). The measured peak on a GPU may differ by 10 %.

    python scripts/bench_gpu.py [--size 1b 4b 8b] [--tokens 8192] [--what attention text vision] [--repeats 5]
                                [--json FILE]

Without CUDA, the checks run on the CPU and nothing is measured. ``--size tiny`` runs the measurements there too, as a
test; its times are meaningless. ``--json`` writes all results to a file, which is updated with every line. Exit code 1
means that a check failed, that the memory estimate was wrong, or that a row failed for another reason than memory.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.attention.choose import KERNELS, choose
from packtool.attention.kernel import Varlen
from packtool.attention.register import set_attention
from packtool.batch.batch import Batch
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import patch_squares
from packtool.planning.cost import CostModel
from packtool.simulate.hardware import peak_tflops
from packtool.train.model.loss import HeadLoss
from scripts._gpu_checks import kernels_at_hand, run_checks, work_type
from scripts._gpu_measure import (
    FAILED,
    HEADINGS,
    OUT_OF_MEMORY,
    Bench,
    Findings,
    Memory,
    Row,
    free_memory,
    measured,
)
from scripts._gpu_models import (
    SIZES,
    Sample,
    Size,
    checkpoint_activations,
    make_model,
    make_samples,
    mixed_lengths,
    pack,
    pad_in_batches,
    text_config,
    vision_config,
)

WHAT = ("attention", "text", "vision")
PICTURE_SIDE = 32
"""Patches along a side of a picture: 512 pixels, 256 tokens."""
MEMORY_MAY_BE_OFF = 0.1


def bench_attention(bench: Bench, name: str) -> Iterator[Row]:
    """Compare every kernel with dense causal attention of the same FLOPs, with the heads of a model size."""
    size, tokens = SIZES[name], bench.options.tokens
    long = max(tokens // 8, 1)
    cases = {
        f"{tokens // length:,} x {length:,}": [length] * (tokens // length) for length in (long // 8, long, tokens)
    }
    cases["mixed lengths"] = mixed_lengths(tokens)
    for case, lengths in cases.items():
        squares = sum(length * length for length in lengths)
        num_rows, length = dense_shape(sum(lengths), squares)
        what = f"{name} attention, {case}"
        row = _attention_row(what, f"dense, {num_rows} x {length:,}", size, num_rows * length, num_rows * length**2)
        base = measured(bench, row, partial(_dense_attention, bench, size, num_rows, length))
        yield replace(base, ratio=1.0)
        for kernel in bench.kernels:
            row = _attention_row(what, kernel, size, sum(lengths), squares)
            found = measured(bench, row, partial(_packed_attention, bench, size, kernel, lengths))
            if base.ms is not None and found.ms is not None:
                # By FLOPs, because dense rows do not have exactly the same number.
                found = replace(found, ratio=(found.flops / found.ms) / (base.flops / base.ms))
            yield found


def dense_shape(tokens: int, squares: int) -> tuple[int, int]:
    """Return number and length of equal rows with about the same tokens and the same sum of squared lengths."""
    length = max(round(squares / tokens), 1)
    return max(round(tokens / length), 1), length


def _attention_row(what: str, way: str, size: Size, tokens: int, squares: int) -> Row:
    """Return a row with the FLOPs of causal attention: scores and weighted sum, and twice that for backward."""
    num_heads, _, head_dim = size.heads
    return Row(what, way, 3.0 * 2 * num_heads * head_dim * squares, tokens)


def _dense_attention(bench: Bench, size: Size, num_rows: int, length: int) -> Callable[[], None]:
    """Return a function that runs torch's causal attention on (B, H, L, D)."""
    num_heads, num_kv_heads, head_dim = size.heads
    q, k, v, out_gradient = (
        torch.randn(num_rows, number, length, head_dim, device=bench.device, dtype=bench.dtype)
        for number in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]

    def run() -> None:
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=num_heads != num_kv_heads)
        torch.autograd.grad(out, inputs, out_gradient)

    return run


def _packed_attention(bench: Bench, size: Size, kernel: str, lengths: Sequence[int]) -> Callable[[], None]:
    """Return a function that runs a kernel on (T, H, D), as a model calls it."""
    num_heads, num_kv_heads, head_dim = size.heads
    q, k, v, out_gradient = (
        torch.randn(sum(lengths), number, head_dim, device=bench.device, dtype=bench.dtype)
        for number in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    varlen = Varlen.of_lengths(lengths, bench.device)

    def run() -> None:
        torch.autograd.grad(KERNELS[kernel].attend(*inputs, varlen), inputs, out_gradient)

    return run


def bench_model(bench: Bench, name: str, *, sees: bool) -> Iterator[Row | Memory]:
    """Measure training steps on the same samples, padded and packed."""
    size, options = SIZES[name], bench.options
    config = vision_config(size) if sees else text_config(size)
    side = min(PICTURE_SIDE, 2 * math.isqrt(options.tokens // 16)) if sees else 0
    least = (side // 2) ** 2 + 32
    samples = make_samples(mixed_lengths(options.tokens, least=least), config, bench.device, picture_side=side)
    row = _model_row(f"{name} {'vision' if sees else 'text'}", config, samples)
    try:
        model = make_model(config, bench.device, bench.dtype)
        recompute = size.recompute if options.recompute == "auto" else options.recompute == "on"
        stepper = Stepper(model, recompute=recompute)
    except torch.OutOfMemoryError:
        yield replace(row, way="weights", note=OUT_OF_MEMORY)
        return
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    row = replace(row, what=f"{row.what}, {billions:.1f}B, {len(samples)} samples")
    padded, grouped = (
        pad_in_batches(samples, options.rows, sees=sees, grouped=by_length) for by_length in (False, True)
    )
    packed: list[Batch] = [pack(samples, config)]
    best = choose("auto", bench.device, bench.dtype).name
    ways = {f"padded, fill {fill_of(padded):.0%}": partial(stepper.prepare, padded, None)}
    ways[f"padded, grouped, fill {fill_of(grouped):.0%}"] = partial(stepper.prepare, grouped, None)
    ways |= {f"packed, {kernel}": partial(stepper.prepare, packed, kernel) for kernel in bench.kernels}
    if best in bench.kernels:
        ways[f"packed, {best}, all logits"] = partial(stepper.prepare, packed, best, all_logits=True)
    base: Row | None = None
    for way, prepare in ways.items():
        found = measured(bench, replace(row, way=way), prepare)
        base = base or found
        if base.ms is not None and found.ms is not None:
            found = replace(found, ratio=base.ms / found.ms)
        yield found
    if best in bench.kernels:
        yield from bench_memory(bench, stepper, samples, config, replace(row, way="memory"))


def bench_memory(bench: Bench, stepper: Stepper, samples: Sequence[Sample], config: Any, row: Row) -> Iterator[Any]:
    """Compare the peak of a packed step with its estimate, with gradients present as in gradient accumulation.

    Args:
        row: printed if there is no figure.
    """
    try:
        from packtool.batch.spec import InputSpec
        from packtool.encode.families import MediaLimits
        from packtool.train.model.trace import trace_pass
        from packtool.train.prepare.figures import RankTokens
    except ImportError as error:
        yield replace(row, note=f"not traced: {error}")
        return
    num_media_tokens = sum(sample.num_media_tokens for sample in samples)
    is_on_gpu = bench.device.type == "cuda"
    best = choose("auto", bench.device, bench.dtype).name
    step = stepper.prepare([pack(samples, config)], best, keep_gradients=True)
    try:
        step()
        free_memory()
        if is_on_gpu:
            torch.cuda.reset_peak_memory_stats(bench.device)
            step()
    except torch.OutOfMemoryError:
        yield replace(row, note=OUT_OF_MEMORY)
        return
    # AdamW's moments are of the weights' type.
    standing = 4 * sum(parameter.numel() * parameter.element_size() for parameter in stepper.model.parameters())
    meta = make_model(config, torch.device("meta"), bench.dtype)
    if stepper.recompute:
        checkpoint_activations(meta)
    spec = InputSpec("", config, MediaLimits())
    traced = trace_pass(meta, spec, RankTokens(computed=row.tokens, vision=num_media_tokens)).peak
    gib = 2**30
    peak = torch.cuda.max_memory_allocated(bench.device) / gib if is_on_gpu else None
    yield Memory(f"{row.what}, memory", (standing + traced) / gib, peak, traced / gib)


def fill_of(batches: Sequence[Batch]) -> float:
    """Return the share of sample tokens among all computed tokens."""
    true = sum(int(batch.model_inputs()["attention_mask"].sum()) for batch in batches)
    return true / sum(batch.input_ids.numel() for batch in batches)


def _model_row(what: str, config: Any, samples: Sequence[Sample]) -> Row:
    """Return a row with the FLOPs and tokens of a step on these samples."""
    tokens = np.array([sample.length for sample in samples])
    media = np.array([sample.num_media_tokens for sample in samples])
    targets = np.array([int((sample.labels != IGNORE_INDEX).sum()) for sample in samples])
    grids = [() if sample.grid is None else tuple(sample.grid[0].tolist()) for sample in samples]
    squares = np.array([patch_squares(grid) for grid in grids])
    cost = CostModel.of_config(config.to_dict())
    flops = cost(tokens, cost.attention(tokens), targets, cost.towers(media, squares)).sum()
    return Row(what, "", float(flops), int(tokens.sum()))


class Stepper:
    """Runs optimizer steps of one model, whose weights carry over from one way to the next.

    Args:
        recompute: whether the backward pass recomputes activations.
    """

    def __init__(self, model: Any, *, recompute: bool) -> None:
        self.model, self.recompute = model.train(), recompute
        if recompute:
            checkpoint_activations(model)
        self.head_loss = HeadLoss(model)
        is_on_gpu = next(model.parameters()).device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=is_on_gpu)

    def prepare(
        self, batches: Sequence[Batch], kernel: str | None, *, all_logits: bool = False, keep_gradients: bool = False
    ) -> Callable[[], None]:
        """Return a function that runs a step, with a packed attention kernel, or None for transformers' SDPA."""
        # Remove gradients of a step that ran out of memory.
        self.optimizer.zero_grad()
        if kernel is None:
            self.model.set_attn_implementation("sdpa")
        else:
            set_attention(self.model, kernel)
        total = sum(batch.num_target_tokens for batch in batches)

        def run() -> None:
            for batch in batches:
                loss = (
                    self._all_logits(batch) if all_logits else self.head_loss.losses(self.model, batch).weighted_sum()
                )
                (loss / total).backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not keep_gradients)

        return run

    def _all_logits(self, batch: Batch) -> Tensor:
        logits = self.model(**batch.model_inputs()).logits.flatten(0, 1).float()
        return F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def check(device: torch.device, findings: Findings) -> tuple[list[str], bool]:
    """Print the environment and every check; return the kernels that passed, and whether all checks did."""
    dtype = work_type(device)
    kernels, missing = kernels_at_hand(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}; torch {torch.__version__}, transformers {transformers.__version__}; {str(dtype)[6:]}")
    print(f"kernels: {', '.join(kernels)}; auto is {choose('auto', device, dtype).name}")
    for kernel, reason in missing.items():
        print(f"  not {kernel}: {reason}")
    findings.found["missing_kernels"] = missing
    print(f"\n{'checks':<62} {'error':>8} {'allowed':>8}")
    failed: set[str] = set()
    for found in run_checks(kernels, device):
        verdict = found.note or ("ok" if found.passed else "FAILED")
        print(f"{found.name:<62} {found.error:>8.1e} {found.allowed:>8.1e}  {verdict}", flush=True)
        findings.add("checks", found, passed=found.passed)
        if not found.passed:
            failed.add(found.kernel)
    free_memory()
    return [] if "" in failed else [kernel for kernel in kernels if kernel not in failed], not failed


def rows_of(bench: Bench) -> Iterator[Row | Memory]:
    """Yield the results of all requested measurements."""
    for name in bench.options.size:
        if "attention" in bench.options.what:
            yield from bench_attention(bench, name)
        for what, sees in (("text", False), ("vision", True)):
            if what in bench.options.what:
                yield from bench_model(bench, name, sees=sees)
                free_memory()


def measure(bench: Bench, findings: Findings) -> bool:
    """Print all results; return whether nothing failed."""
    print(HEADINGS)
    passed = True
    for found in rows_of(bench):
        if isinstance(found, Row):
            found.print(bench.peak)
            findings.add("rows", found, tflops=found.tflops, mfu=found.mfu(bench.peak))
            passed &= not found.note.startswith(FAILED)
            continue
        is_right = found.ratio is None or abs(found.ratio - 1) <= MEMORY_MAY_BE_OFF
        found.print(is_right)
        findings.add("memory", found, ratio=found.ratio, passed=is_right)
        passed &= is_right
    return passed


def main(arguments: list[str] | None = None) -> int:
    """Check, measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, help="default is 1b on a GPU, and none without a GPU")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--rows", type=int, default=4, help="rows of a padded micro-batch")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=WHAT)
    parser.add_argument(
        "--recompute", choices=("auto", "on", "off"), default="auto", help="auto recomputes for 4b and larger"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all results to this file")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    findings = Findings(options.json)
    kernels, all_passed = check(device, findings)
    options.size = options.size or (["1b"] if has_gpu else [])
    if not options.size:
        print("\nno CUDA device: the checks ran on the CPU, and nothing was measured")
    elif not kernels:
        print("\nno kernel passed its checks, so nothing was measured")
    if not options.size or not kernels:
        return 0 if all_passed else 1
    peak = peak_tflops(torch.cuda.get_device_name()) if has_gpu else None
    bench = Bench(device, work_type(device), kernels, peak, options)
    print(f"\n{options.tokens:,} tokens; peak {f'{peak:g} TFLOP/s' if peak else 'not known'}; ratio to the first row\n")
    return 0 if measure(bench, findings) and all_passed else 1


if __name__ == "__main__":
    gc.freeze()  # garbage collection then skips imported modules
    atexit.register(gc.unfreeze)  # some libraries check for leaks at exit
    sys.exit(main())
