#!/usr/bin/env python3
"""Compare packers on lognormal lengths: time, packs, fill, packs over the lower bound, memory.

    python scripts/bench_packing.py [--sizes 50000 393230 4000000] [--median 1500] [--sigma 1.0] [--time-limit 60]

Every figure comes from a process of its own, which is ended at the time limit. packtool's figure is the median of three
epochs; the others run once. TRL packs token columns, not lengths: it is given one byte a token, and moves them too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.plan.packing import pack_best_fit

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Result:
    """What one packer did: packs and seconds, and the process's peak memory in MiB beyond the lengths'."""

    num_packs: int
    seconds: float
    peak_mib: float


@dataclass(frozen=True)
class Packer:
    """A packer's name, the library it needs, and the function from lengths and capacity to packs and seconds."""

    name: str
    needs: str
    pack: Callable[[Lengths, int], tuple[int, float]]
    max_samples: int = 1 << 62


def lognormal_lengths(num: int, median: float, sigma: float, capacity: int) -> Lengths:
    """Lengths clipped to 16 ... ``capacity``."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, num)
    return np.clip(lengths, 16, capacity, out=lengths).astype(np.int32)


@contextlib.contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yields a list that holds the seconds afterwards."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


def run_packtool(lengths: Lengths, capacity: int) -> tuple[int, float]:
    """The plan that training uses."""
    times, num_packs = [], 0
    for epoch in range(3):
        with stopwatch() as seconds:
            num_packs = pack_best_fit(lengths, capacity, seed=0, epoch=epoch).num_packs
        times += seconds
    return num_packs, statistics.median(times)


def run_next_fit(lengths: Lengths, capacity: int) -> tuple[int, float]:
    """Whatever does not fit in the current pack opens a new one."""
    with stopwatch() as seconds:
        packs: list[list[int]] = []
        room = 0
        for sample, length in enumerate(lengths.tolist()):
            if length > room:
                packs.append([])
                room = capacity
            packs[-1].append(sample)
            room -= length
    return len(packs), seconds[0]


def run_binpacking(lengths: Lengths, capacity: int, chunk: int | None = None) -> tuple[int, float]:
    """The library that ms-swift uses."""
    from binpacking.to_constant_volume import to_constant_volume

    items = list(enumerate(lengths.tolist()))
    chunk = chunk or len(items)
    with stopwatch() as seconds:
        num_packs = sum(
            len(to_constant_volume(items[start : start + chunk], capacity, weight_pos=1))
            for start in range(0, len(items), chunk)
        )
    return num_packs, seconds[0]


def run_binpacking_in_thousands(lengths: Lengths, capacity: int) -> tuple[int, float]:
    """As ms-swift calls it."""
    return run_binpacking(lengths, capacity, 1000)


def run_trl(lengths: Lengths, capacity: int, chunk: int | None = None) -> tuple[int, float]:
    """TRL's best-fit decreasing, on a column of one byte a token."""
    import datasets
    import pyarrow
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    column = pyarrow.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], dtype=np.int8))
    rows = datasets.Dataset(pyarrow.table({"input_ids": column}))
    with stopwatch() as seconds:
        packed = pack_dataset(rows, capacity, "bfd", map_kwargs={"batch_size": chunk or len(rows)})
    return len(packed), seconds[0]


def run_trl_in_thousands(lengths: Lengths, capacity: int) -> tuple[int, float]:
    """As ``pack_dataset`` does unless told otherwise."""
    return run_trl(lengths, capacity, 1000)


PACKERS = (
    Packer("packtool", "", run_packtool),
    Packer("next-fit, plain loop", "", run_next_fit),
    Packer("binpacking, thousands", "binpacking", run_binpacking_in_thousands),
    Packer("binpacking, whole", "binpacking", run_binpacking, max_samples=50_000),
    Packer("TRL BFD, thousands", "trl", run_trl_in_thousands, max_samples=1_000_000),
    Packer("TRL BFD, whole", "trl", run_trl, max_samples=1_000_000),
)


def measure(packer: Packer, lengths: Lengths, capacity: int, time_limit: float) -> Result | str:
    """Run a packer in a process of its own; a string says why there is no result."""
    if packer.needs and importlib.util.find_spec(packer.needs) is None:
        return f"{packer.needs} is not installed"
    if len(lengths) > packer.max_samples:
        return f"left out above {packer.max_samples:,}"
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_here, args=(packer, lengths, capacity, sender))
    process.start()
    sender.close()
    try:
        result: Result | str = receiver.recv() if receiver.poll(time_limit) else f"over {time_limit:g} s"
    except EOFError:
        result = "failed"
    process.kill()
    process.join()
    return result


def _measure_here(packer: Packer, lengths: Lengths, capacity: int, sender: Connection) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_packs, seconds = packer.pack(lengths, capacity)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender.send(Result(num_packs, seconds, (after - before) / 1024))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50_000, 393_230, 4_000_000])
    parser.add_argument("--median", type=float, default=1500)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--capacity", type=int, default=10240)
    parser.add_argument("--time-limit", type=float, default=60, help="seconds for one packer at one size")
    args = parser.parse_args()
    print(f"lognormal({args.median:g}, {args.sigma:g}) clipped to [16, {args.capacity}], capacity {args.capacity}")
    print(f"{'samples':>10}  {'packer':<22} {'seconds':>9} {'packs':>10} {'fill':>9} {'over bound':>11} {'MiB':>7}")
    for size in args.sizes:
        lengths = lognormal_lengths(size, args.median, args.sigma, args.capacity)
        num_tokens = int(lengths.sum(dtype=np.int64))
        bound = -(-num_tokens // args.capacity)
        for packer in PACKERS:
            result = measure(packer, lengths, args.capacity, args.time_limit)
            line = f"{size:>10,}  {packer.name:<22} "
            if isinstance(result, Result):
                fill = num_tokens / (result.num_packs * args.capacity)
                over = result.num_packs / bound - 1
                line += (
                    f"{result.seconds:>9.3f} {result.num_packs:>10,} {fill:>9.3%} {over:>11.4%} {result.peak_mib:>7.0f}"
                )
            else:
                line += result
            print(line, flush=True)


if __name__ == "__main__":
    main()
