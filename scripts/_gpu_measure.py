"""Time and memory of what ``bench_gpu.py`` measures, printed row by row and kept as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

OUT_OF_MEMORY, FAILED = "out of memory", "failed"


@dataclass(frozen=True)
class Bench:
    """What all measurements share.

    Args:
        kernels: names of those that run here.
        peak: TFLOP/s that the device can do, None if nobody knows.
    """

    device: torch.device
    dtype: torch.dtype
    kernels: Sequence[str]
    peak: float | None
    options: argparse.Namespace


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        flops: of true tokens in one repeat.
        tokens: true ones of one repeat.
        ms: median; None if there is no figure, and ``note`` says why.
        gib: peak memory.
        ratio: speed over that of the row it is compared with.
    """

    what: str
    way: str
    flops: float
    tokens: int
    ms: float | None = None
    gib: float | None = None
    ratio: float | None = None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        """TFLOP/s; None where nothing was measured."""
        return None if self.ms is None else self.flops / self.ms / 1e9

    def mfu(self, peak: float | None) -> float | None:
        """Share of the TFLOP/s that the device can do, where both are known."""
        return None if self.tflops is None or not peak else self.tflops / peak

    def print(self, peak: float | None) -> None:
        """Print the line, with a dash where nothing is known."""
        start = f"{self.what:<30} {self.way:<30}"
        if self.ms is None:
            print(f"{start}  {self.note}", flush=True)
            return
        share = self.mfu(peak)
        mfu = "-" if share is None else f"{share:.1%}"
        gib = f"{self.gib:.1f}" if self.gib is not None else "-"
        ratio = f"{self.ratio:.2f}" if self.ratio is not None else "-"
        rate = self.tokens / self.ms * 1e3
        print(f"{start} {self.ms:>9.2f} {rate:>10,.0f} {self.tflops:>8.1f} {mfu:>6} {gib:>6} {ratio:>6}", flush=True)


HEADINGS = f"{'what':<30} {'way':<30} {'ms':>9} {'tokens/s':>10} {'TFLOP/s':>8} {'MFU':>6} {'GiB':>6} {'ratio':>6}"


def measured(bench: Bench, row: Row, prepare: Callable[[], Callable[[], None]]) -> Row:
    """Time and peak memory of what ``prepare`` returns; too little memory, and any error, become a note."""
    try:
        free_memory()
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        ms = median_ms(prepare(), bench)
        gib = torch.cuda.max_memory_allocated(bench.device) / 2**30 if bench.device.type == "cuda" else None
        return replace(row, ms=ms, gib=gib)
    except torch.OutOfMemoryError:
        return replace(row, note=OUT_OF_MEMORY)
    except Exception as error:  # one row must not keep the others from being measured
        first = (str(error).splitlines() or [""])[0]
        return replace(row, note=f"{FAILED}: {type(error).__name__}: {first[:90]}")


def median_ms(run: Callable[[], None], bench: Bench) -> float:
    """Milliseconds of a call, after a warm-up."""
    for _ in range(bench.options.warm_up):
        run()
    times = []
    for _ in range(bench.options.repeats):
        if bench.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            since = time.perf_counter()
            run()
            times.append((time.perf_counter() - since) * 1e3)
    return statistics.median(times)


def free_memory() -> None:
    """Give back what no tensor holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Memory:
    """The peak of a training step's memory, told beforehand and measured.

    Args:
        traced: GiB of weights, gradients and moments, and what a trace of the pass adds.
        measured: GiB of the GPU that there were; None without one.
        passing: those of ``traced`` that the pass adds.
    """

    what: str
    traced: float
    measured: float | None
    passing: float

    @property
    def ratio(self) -> float | None:
        """Traced over measured."""
        return None if self.measured is None else self.traced / self.measured

    def print(self, is_right: bool) -> None:
        """One line.

        Args:
            is_right: whether both are close enough.
        """
        told = f"{self.what}: traced {self.traced:.3f} GiB, of it {self.passing:.3f} of the pass"
        if self.measured is not None:
            verdict = "ok" if is_right else "FAILED"
            told += f"; measured {self.measured:.3f} GiB; ratio {self.ratio:.2f}, {verdict}"
        print(told, flush=True)


@dataclass
class Findings:
    """Everything that was found, written anew with every addition: an interrupted run keeps what it has.

    Args:
        file: JSON; None for none.
    """

    file: Path | None
    found: dict[str, Any] = field(default_factory=lambda: {"checks": [], "rows": [], "memory": []})

    def add(self, kind: str, value: Any, **more: Any) -> None:
        """Add a check, a row or a memory."""
        record = asdict(value) | more
        # JSON has no word for what is not a number.
        self.found[kind].append(
            {
                name: None if isinstance(each, float) and not math.isfinite(each) else each
                for name, each in record.items()
            }
        )
        if self.file is not None:
            self.file.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
