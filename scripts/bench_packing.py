#!/usr/bin/env python3
"""Compare packers on lognormal lengths: time, packs, fill, packs above the lower bound, memory.

    python scripts/bench_packing.py [--sizes 50000 393230 4000000] [--median 1500] [--sigma 1.0] [--rounds 5]
                                    [--time-limit 60] [--plot FILE.svg]

All packers run one after the other, and this is repeated ``--rounds`` times. The table shows the median time, and the
smallest and largest. Each run has its own process, which is stopped at the time limit. A packer that was stopped or
failed is not run again. packtool's time is from the array of lengths to the finished plan. TRL packs columns of tokens,
not lengths, so it gets one byte per token and also moves these bytes. The plot shows time by size, both on logarithmic
axes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import multiprocessing
import pathlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.config.packing import PackOptions
from packtool.planning.best_fit import count_lengths
from packtool.planning.packing import pack
from packtool.report.drawing import AXIS_LENGTH, CURVE_COLOURS, Axis, Box, Path
from scripts._picture import Word, svg_picture

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Result:
    """Result of a packer: packs, seconds, and the peak memory of its process in MiB, without the lengths."""

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
    """Return random lengths, clipped to 16 ... ``capacity``."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, num)
    return np.clip(lengths, 16, capacity, out=lengths).astype(np.int32)


@contextlib.contextmanager
def stopwatch() -> Iterator[list[float]]:
    """Yield a list to which the elapsed seconds are appended."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


def run_packtool(lengths: Lengths, capacity: int, **options: Any) -> tuple[int, float]:
    """Run packtool's packer, as training does."""
    pack(lengths[:10], capacity, PackOptions(**options), seed=0, epoch=0)  # imports, which no packer's time includes
    with stopwatch() as seconds:
        plan = pack(lengths, capacity, PackOptions(**options), seed=0, epoch=0)
    return plan.num_packs, seconds[0]


def run_first_fit(lengths: Lengths, capacity: int) -> tuple[int, float]:
    """Run first-fit decreasing on the histogram of lengths, without assigning samples."""
    from scripts._first_fit import place_first_fit

    with stopwatch() as seconds:
        distinct, counts = count_lengths(np.asarray(lengths))
        placements = place_first_fit(distinct.tolist(), counts.tolist(), capacity)
    return placements.total_packs, seconds[0]


def run_next_fit(lengths: Lengths, capacity: int) -> tuple[int, float]:
    """Run next-fit: a sample that does not fit into the current pack opens a new one."""
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
    """Run ``binpacking``, the library that ms-swift uses."""
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
    """Run ``binpacking`` in blocks of 1,000 samples, as ms-swift does."""
    return run_binpacking(lengths, capacity, 1000)


def run_llama_factory(lengths: Lengths, capacity: int) -> tuple[int, float]:
    """Run LLaMA-Factory's packer in blocks of 1,000 samples, its default."""
    from llamafactory.data.processor.processor_utils import greedy_knapsack

    items = lengths.tolist()
    with stopwatch() as seconds:
        num_packs = sum(
            len(greedy_knapsack(items[start : start + 1000], capacity)) for start in range(0, len(items), 1000)
        )
    return num_packs, seconds[0]


def run_trl(lengths: Lengths, capacity: int, chunk: int | None = None) -> tuple[int, float]:
    """Run TRL's best-fit decreasing on a column with one byte per token."""
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
    """Run TRL's packing in blocks of 1,000 samples, the default of ``pack_dataset``."""
    return run_trl(lengths, capacity, 1000)


PACKERS = (
    Packer("packtool best_fit", "", run_packtool),
    Packer("packtool sequential 64", "", partial(run_packtool, packing_algorithm="sequential", look_ahead=64)),
    Packer("first-fit decreasing", "", run_first_fit),
    Packer("next-fit, plain loop", "", run_next_fit),
    Packer("binpacking, thousands", "binpacking", run_binpacking_in_thousands),
    Packer("binpacking, whole", "binpacking", run_binpacking),
    Packer("LLaMA-Factory, thousands", "llamafactory", run_llama_factory),
    # Four million samples of one byte a token are nine gigabytes, several times over.
    Packer("TRL BFD, thousands", "trl", run_trl_in_thousands, max_samples=1_000_000),
    Packer("TRL BFD, whole", "trl", run_trl, max_samples=1_000_000),
)


def measure_rounds(
    lengths: Lengths, capacity: int, rounds: int, time_limit: float, too_slow: set[str]
) -> dict[str, list[Result] | str]:
    """Run all packers in turn, ``rounds`` times; return the results of each, or a string with the reason for none.

    Packers in ``too_slow`` are not run. Those that reach the time limit are added to it.
    """
    results: dict[str, list[Result] | str] = {
        packer.name: "was too slow with fewer" if packer.name in too_slow else [] for packer in PACKERS
    }
    for _ in range(rounds):
        for packer in PACKERS:
            earlier = results[packer.name]
            if isinstance(earlier, list):
                result = measure(packer, lengths, capacity, time_limit)
                results[packer.name] = result if isinstance(result, str) else [*earlier, result]
                if result == f"over {time_limit:g} s":
                    too_slow.add(packer.name)
    return results


def measure(packer: Packer, lengths: Lengths, capacity: int, time_limit: float) -> Result | str:
    """Run a packer in its own process; return its result, or a string with the reason for none."""
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


def table_line(size: int, name: str, results: list[Result] | str, num_tokens: int, capacity: int) -> str:
    """Return a line of the table; a string instead of results is the reason for none."""
    line = f"{size:>10,}  {name:<24} "
    if isinstance(results, str):
        return line + results
    num_packs = results[0].num_packs
    fill = num_tokens / (num_packs * capacity)
    over = num_packs / -(-num_tokens // capacity) - 1
    peak = statistics.median(result.peak_mib for result in results)
    times = [result.seconds for result in results]
    spread = f"{min(times):.3f} to {max(times):.3f}"
    return (
        f"{line}{statistics.median(times):>9.3f} {spread:>18} {num_packs:>10,} {fill:>9.3%} {over:>11.4%} {peak:>7.0f}"
    )


def decades(name: str, values: list[float], suffix: str = "") -> Axis:
    """A logarithmic axis of whole decades around all values: its own values are the powers of ten."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    ticks = [(power, f"{10.0**power:,.12g}{suffix}") for power in range(low, high + 1)]
    return Axis(name, low, high, ticks)


def draw_plot(title: str, measured: dict[str, list[tuple[int, float]]]) -> str:
    """Return an SVG of time by size, with one labeled line per packer.

    Args:
        title: what was packed.
        measured: samples and seconds, by packer.
    """
    measured = {name: points for name, points in measured.items() if points}
    x = decades("samples", [float(size) for points in measured.values() for size, _ in points])
    y = decades("seconds", [seconds for points in measured.values() for _, seconds in points], " s")
    shapes = [Word(LEFT, 28, title, DARK, size=16), *grid(x, y), *lines(x, y, measured)]
    return svg_picture(WIDTH, HEIGHT, "time against size", shapes)


def across(at: float) -> float:
    """Return the x coordinate in pixels of a position on the horizontal axis."""
    return LEFT + at / AXIS_LENGTH * (RIGHT - LEFT)


def down(at: float) -> float:
    """Return the y coordinate in pixels of a position on the vertical axis."""
    return BOTTOM - at / AXIS_LENGTH * (BOTTOM - TOP)


def grid(x: Axis, y: Axis) -> Iterator[Box | Word]:
    """Draw a grid line and a label for every decade."""
    for at, label in x.tick_positions:
        yield Box(across(at), TOP, 1, BOTTOM - TOP, PALE)
        yield Word(across(at), BOTTOM + 20, label, GREY, "middle")
    for at, label in y.tick_positions:
        yield Box(LEFT, down(at), RIGHT - LEFT, 1, PALE)
        yield Word(LEFT - 8, down(at) + 4, label, GREY, "end")
    yield Word((LEFT + RIGHT) / 2, BOTTOM + 42, x.name, GREY, "middle")


def lines(x: Axis, y: Axis, measured: dict[str, list[tuple[int, float]]]) -> Iterator[Box | Path | Word]:
    """Draw a line for each packer, with its name at the end; overlapping names are moved apart."""
    largest = max(size for points in measured.values() for size, _ in points)
    lowest = 0.0
    for name, points in sorted(measured.items(), key=lambda item: -item[1][-1][1]):
        colour = COLOURS[list(measured).index(name) % len(COLOURS)]
        places = [
            (across(x.position(math.log10(size))), down(y.position(math.log10(seconds)))) for size, seconds in points
        ]
        end_x, end_y = places[-1]
        lowest = max(end_y + 4, lowest + 16)
        yield Path([[(end_x + 5, end_y), (RIGHT + 10, lowest - 4)]], PALE)
        yield Path([places], colour)
        for at_x, at_y in places:
            yield Box(at_x - 3, at_y - 3, 6, 6, colour)
        size, seconds = points[-1]
        told = f"{seconds:.2g} s" if size == largest else f"up to {size:,}"
        yield Word(RIGHT + 14, lowest, f"{name}, {told}", colour)


WIDTH, HEIGHT = 920, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 620, 60, 420
DARK, GREY, PALE = (CURVE_COLOURS[name] for name in ("ink", "grey", "grid"))
COLOURS = [CURVE_COLOURS[f"c{number}"] for number in range(8)]


def main(arguments: list[str] | None = None) -> None:
    """Measure all packers, print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50_000, 393_230, 4_000_000])
    parser.add_argument("--median", type=float, default=1500)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--capacity", type=int, default=10240)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each packer")
    parser.add_argument("--time-limit", type=float, default=60, help="time limit in seconds for one packer at one size")
    parser.add_argument(
        "--plot", type=pathlib.Path, metavar="FILE", help="write a plot of time by size as an .svg file"
    )
    args = parser.parse_args(arguments)
    title = f"lognormal({args.median:g}, {args.sigma:g}) clipped to [16, {args.capacity}], capacity {args.capacity}"
    print(title)
    columns = f"{'seconds':>9} {'from, to':>18} {'packs':>10} {'fill':>9} {'over bound':>11} {'MiB':>7}"
    print(f"{'samples':>10}  {'packer':<24} {columns}")
    measured: dict[str, list[tuple[int, float]]] = {packer.name: [] for packer in PACKERS}
    too_slow: set[str] = set()
    for size in sorted(args.sizes):
        lengths = lognormal_lengths(size, args.median, args.sigma, args.capacity)
        num_tokens = int(lengths.sum(dtype=np.int64))
        measured_now = measure_rounds(lengths, args.capacity, args.rounds, args.time_limit, too_slow)
        for name, results in measured_now.items():
            if isinstance(results, list):
                seconds = statistics.median(result.seconds for result in results)
                measured[name].append((size, max(seconds, 1e-6)))
            print(table_line(size, name, results, num_tokens, args.capacity), flush=True)
    if args.plot is not None:
        args.plot.write_text(draw_plot(f"Seconds to pack {title}", measured))
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
