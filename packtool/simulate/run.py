"""``packtool simulate``: read lengths, model and hardware, then plan and time every strategy. No torch.

Lengths come from caches, from files, or are drawn like those of known data sets. Each distribution is a quantile
function through the shares that Skrull (arXiv 2505.19609) prints of a data set: the percentages of samples shorter than
1K, 4K, ..., and the tokens of the longest. Between two points the logarithm of the length rises linearly. Nothing is
published below 1K tokens; there the function starts at ``SHORTEST``, which is our assumption. K is 1,024 tokens.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json, part_of
from packtool.config.simulate import BASELINE, DistributionName, SimulateConfig, StrategyName
from packtool.errors import ConfigError, DataError
from packtool.planning.cost import MODEL_PRESETS, ModelSizes
from packtool.planning.pack_plan import IntArray
from packtool.planning.shuffle import RandomStream, seeded_order
from packtool.planning.skrull import SHARDED
from packtool.planning.steps import imbalance
from packtool.progress import Progress
from packtool.simulate.hardware import read_hardware
from packtool.simulate.machine import Machine, SimulatedSchedule, Timing, can_share_heads
from packtool.simulate.strategies import TITLES, Sequences, SimulateOptions, schedule

SHORTEST = 64
DOMINATED_BALANCE = 1.2
"""A step is dominated by one sequence if its work divided by the mean work of a group is at least this."""
_K = 1024


def _points(longest: int, *shares: float) -> tuple[tuple[float, int], ...]:
    tokens = (SHORTEST, _K, 4 * _K, 8 * _K, 32 * _K, longest * _K)
    return tuple(zip((0.0, *shares, 1.0), tokens, strict=True))


POINTS: dict[DistributionName, tuple[tuple[float, int], ...]] = {
    "wikipedia": _points(78, 0.8788, 0.9934, 0.9992, 0.9999),
    "lmsys": _points(1643, 0.8712, 0.9935, 0.9987, 0.9998),
    "chatqa2": _points(99, 0.2192, 0.3148, 0.4043, 0.9986),
}
"""(share of samples below, tokens) of Wikipedia, LMSYS-Chat-1M and ChatQA2-Long-SFT."""


def quantiles(name: DistributionName, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Compute the tokens below which these shares, 0 to 1, of the samples lie; arguments and result of any shape."""
    points, tokens = (np.array(column, dtype=np.float64) for column in zip(*POINTS[name], strict=True))
    lengths: npt.NDArray[Any] = np.exp(np.interp(shares, points, np.log(tokens)))
    return np.round(lengths).astype(np.int64)


def draw_lengths(name: DistributionName, num: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Draw lengths, int64 (num,), always the same for a seed; a larger ``num`` begins with the same ones."""
    return quantiles(name, np.random.default_rng([seed, RandomStream.SIMULATED_LENGTHS]).random(num))


def read_lengths(path: str) -> npt.NDArray[np.int64]:
    """Read lengths, int64 (N,), from a .npy file, a JSON list of numbers, or a text file with a number per line."""
    try:
        with storage.open_read(path) as file:
            if path.endswith(".npy"):
                values = np.load(file, allow_pickle=False)
            elif path.endswith(".json"):
                values = np.array(load_json(file.read()))
            elif path.endswith(".txt"):
                values = _parse_numbers(file.read())
            else:
                raise ConfigError(f"--lengths {path}: the file must end in .npy, .json or .txt")
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"the file holds {values.dtype} of shape {values.shape}, not a list of whole numbers")
    except ValueError as error:
        raise DataError(f"--lengths {path}: {error}", "Give one whole number per sample.") from error
    return values.astype(np.int64, copy=False)


def _parse_numbers(text: bytes) -> npt.NDArray[np.int64]:
    """Parse the whole numbers of a text with white space between them, int64 (N,); ValueError for anything else."""
    if text.translate(None, delete=b"0123456789 \t\r\n"):  # a sign, or not a number: slower, but with an error
        return np.array(text.split(), dtype=np.int64)
    return np.fromstring(text.strip(), dtype=np.int64, sep=" ")


def names_of(paths: Sequence[str]) -> str:
    """Return the title of a page on caches or files: their names without folders."""
    return " + ".join(storage.name(path if storage.is_remote(path) else os.path.abspath(path)) for path in paths)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Cost of a strategy over its S steps, for N sequences; tokens and FLOPs are without padding.

    ``local_share`` is the share of the tokens of sequences on one device; ``out_of_memory``, (S,), is of each step.
    """

    name: StrategyName
    timing: Timing
    num_tokens: int
    flops_of_sequences: npt.NDArray[np.float64]
    local_share: float
    out_of_memory: npt.NDArray[np.bool_]
    options: SimulateOptions

    @property
    def num_sequences(self) -> int:
        return len(self.timing.schedule.samples)

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def num_steps(self) -> int:
        return self.timing.schedule.num_steps

    @property
    def seconds_per_token(self) -> float:
        """Seconds of all steps divided by their true tokens."""
        return float(self.timing.step_seconds.sum()) / self.num_tokens

    @property
    def recomputed_layers(self) -> float:
        """Mean share of the layers, 0 to 1, that recompute their activations, weighted by tokens."""
        return float(np.average(self.timing.recomputed, weights=self.timing.tokens))

    def speedup_over(self, other: Outcome) -> float:
        """Divide the tokens per second by another outcome's."""
        return other.seconds_per_token / self.seconds_per_token

    def figures(self, baseline: Outcome) -> dict[str, Any]:
        """Return all figures by their names in JSON; times in seconds, memory in GB of 10^9 bytes."""
        return {
            "strategy": self.name,
            "title": self.title,
            "steps": self.num_steps,
            "sequences_per_step": self.num_sequences / self.num_steps,
            "tokens_per_step": self.num_tokens / self.num_steps,
            **self._speed_figures(baseline),
            **self._device_figures(),
        }

    def _speed_figures(self, baseline: Outcome) -> dict[str, float]:
        """Return the seconds of steps, and the speed of the GPUs."""
        step_seconds, machine = self.timing.step_seconds, self.options.machine
        tokens_per_second = 1 / self.seconds_per_token
        peak_flops = float(step_seconds.sum()) * machine.world_size * machine.hardware.peak
        return {
            "step_seconds": float(step_seconds.mean()),
            "slowest_step_seconds": float(step_seconds.max()),
            "tokens_per_second_per_device": tokens_per_second / machine.world_size,
            "speedup": self.speedup_over(baseline),
            "mfu": float(self.flops_of_sequences.sum()) / peak_flops,
        }

    def _device_figures(self) -> dict[str, Any]:
        """Return how evenly the GPUs are used, and their communication, padding and memory, by names in JSON.

        A balance is the work of the busiest GPU of a step divided by the mean, 1 or more. Shares are from 0 to 1.
        """
        timing = self.timing
        step_imbalances = imbalance(timing.busy_seconds)  # (steps,)
        num_tokens_with_padding = int(timing.schedule.tokens.sum())
        out_of_memory_steps = int(self.out_of_memory.sum())
        return {
            "balance": float(step_imbalances.mean()),
            "worst_balance": float(step_imbalances.max()),
            "communication_share": float(timing.communication_seconds.sum() / timing.step_seconds.sum()),
            "shares": timing.shares,
            "local_share": self.local_share,
            "padding_share": 1 - self.num_tokens / num_tokens_with_padding,
            "micro_batches": float(timing.num_micro_batches.max(axis=1).mean()),
            "peak_memory_gb": float(timing.memory.max()) / 1e9,
            "recomputed_layers": self.recomputed_layers,
            # A device's equal share of a sharded sequence may be a fraction of a token.
            "most_tokens_on_a_device": int(np.ceil(timing.tokens.max())),
            "out_of_memory_steps": out_of_memory_steps,
        }


def arrange(lengths: IntArray, options: SimulateOptions, targets: IntArray | None = None) -> Sequences:
    """Shuffle sequences (N,), without those that no strategy could train; ``targets`` None: all tokens."""
    if len(lengths) and int(lengths.min()) < 1:
        raise DataError(f"{int(np.count_nonzero(lengths < 1)):,} samples have no tokens.", "Remove them.")
    order = seeded_order(len(lengths), seed=options.seed, epoch=0, stream=RandomStream.SIMULATED_ORDER)
    kept = order[lengths[order] <= options.longest_trainable]
    if not len(kept):
        raise DataError(
            f"No sample is left to simulate: of {len(lengths):,}, none has at most {options.longest_trainable:,} "
            f"tokens, which {options.sequence_parallel_size} x {options.bucket_size:,} can hold.",
            "Raise --bucket-size or --sequence-parallel-size.",
        )
    targets = lengths if targets is None else targets
    return Sequences(lengths[kept].astype(np.int32), targets[kept].astype(np.int64))


def simulate(sequences: Sequences, names: Iterable[StrategyName], options: SimulateOptions) -> Iterator[Outcome]:
    """Plan and time each strategy, one after the other; ``sequences`` come from ``arrange``."""
    for name in names:
        yield outcome(name, schedule(name, sequences, options), sequences, options)


def outcome(name: StrategyName, plan: SimulatedSchedule, sequences: Sequences, options: SimulateOptions) -> Outcome:
    """Time a schedule, and find the steps that run out of memory."""
    machine = options.machine
    cost = machine.sizes.cost
    lengths, targets = sequences.lengths[plan.samples].astype(np.int64), sequences.targets[plan.samples]
    timing = machine.time(plan, targets)
    is_full = (timing.tokens > options.bucket_size) | (timing.memory > machine.usable_bytes)
    out_of_memory = np.zeros(plan.num_steps, dtype=np.bool_)
    out_of_memory[plan.micro_batch_steps[plan.row_micro_batches[is_full]]] = True
    num_tokens, num_local_tokens = int(lengths.sum()), int(lengths[plan.placement != SHARDED].sum())
    flops = cost(lengths, cost.attention(lengths), target_tokens=targets)
    return Outcome(name, timing, num_tokens, flops, num_local_tokens / num_tokens, out_of_memory, options)


_DEFAULT_SEQUENCES = 20_000
_MIN_STEPS, _MAX_STEPS = 2, 32  # simulated by default
_NUM_TYPICAL = 10_000
_DEFAULT_MODEL = "8b"


@dataclass(frozen=True, eq=False)
class Simulation:
    """Outcomes, in the requested order, and their context.

    Args:
        source: paths of the caches or of the file of lengths, or a distribution; ``name`` is without folders.
        num_left_out: longer than any strategy could train, or than ``--max-length``.
        seconds: of planning and timing.
    """

    outcomes: list[Outcome]
    options: SimulateOptions
    source: str
    name: str
    num_sequences: int
    num_left_out: int
    model: str
    seconds: float

    @property
    def baseline(self) -> Outcome:
        """The outcome that speed-ups are relative to."""
        return next((outcome for outcome in self.outcomes if outcome.name == BASELINE), self.outcomes[0])

    @property
    def num_dominated_steps(self) -> int:
        """Steps of the baseline in which one sequence exceeds the mean work of a group by a fifth or more."""
        flops, schedule = self.baseline.flops_of_sequences, self.baseline.timing.schedule
        steps = schedule.micro_batch_steps[schedule.micro_batch_of]
        largest_flops = np.zeros(schedule.num_steps)
        np.maximum.at(largest_flops, steps, flops)
        mean_group_flops = np.bincount(steps, flops, minlength=schedule.num_steps) / self.options.num_groups
        return int(np.count_nonzero(largest_flops >= DOMINATED_BALANCE * mean_group_flops))

    def figures(self) -> dict[str, Any]:
        """Return all figures by their names in JSON."""
        options, machine = self.options, self.options.machine
        return {
            "source": self.source,
            "num_samples": self.num_sequences,
            "filtered": self.num_left_out,
            "model": self.model,
            "world_size": machine.world_size,
            "sequence_parallel_size": options.sequence_parallel_size,
            "bucket_size": options.bucket_size,
            "packing_length": options.packing_length,
            "sequences_per_step": options.sequences_per_step,
            "hardware": dataclasses.asdict(machine.hardware),
            "constants": dataclasses.asdict(machine.constants),
            "gradient_checkpointing": machine.recompute,
            "sequence_parallel_type": options.exchange_type,
            "zero_stage": machine.zero_stage,
            "seed": options.seed,
            "baseline": self.baseline.name,
            "dominated_steps": self.num_dominated_steps,
            "strategies": [outcome.figures(self.baseline) for outcome in self.outcomes],
            "seconds": round(self.seconds, 3),
            "model_sizes": dataclasses.asdict(machine.sizes),
        }


def run_simulation(config: SimulateConfig, progress: Progress) -> Simulation:
    """Simulate training with each of ``config.strategies`` on imagined hardware, and return times and memory.

    Lengths of samples come from caches, a file, or a distribution; the hardware from a preset or a file, the model also
    from the cache.
    Samples longer than ``--max-length``, or than any strategy could train, are left out.
    """
    reader = CacheReader.open(config.cached_dataset) if config.cached_dataset else None
    model, sizes = _model_of(config.model, reader)
    _check_heads(config, sizes)
    hardware = read_hardware(config.hardware)
    machine = part_of(Machine, config, sizes=sizes, hardware=hardware, recompute=config.gradient_checkpointing)
    options = _options(config, machine, model)
    lengths, targets, source = _lengths_and_targets(config, options, reader)

    begin = time.perf_counter()
    num_samples = len(lengths)
    if config.max_length:
        is_allowed = lengths <= config.max_length
        lengths, targets = lengths[is_allowed], targets[is_allowed]
    sequences = arrange(lengths, options, targets)
    outcomes = _simulate_with_progress(config, sequences, options, progress)
    return Simulation(
        outcomes=outcomes,
        options=options,
        source=source,
        name=_name_of(config, source),
        num_sequences=len(sequences),
        num_left_out=num_samples - len(sequences),
        model=model,
        seconds=time.perf_counter() - begin,
    )


def _name_of(config: SimulateConfig, source: str) -> str:
    paths = config.cached_dataset or ([config.lengths] if config.lengths is not None else [])
    return names_of(paths) if paths else source


def _simulate_with_progress(
    config: SimulateConfig, sequences: Sequences, options: SimulateOptions, progress: Progress
) -> list[Outcome]:
    names = cast("list[StrategyName]", list(dict.fromkeys(config.strategies)))  # each once
    progress.start("simulating", len(names))
    outcomes = []
    for each in simulate(sequences, names, options):
        outcomes.append(each)
        progress.advance(1)
    progress.finish()
    return outcomes


def _check_heads(config: SimulateConfig, sizes: ModelSizes) -> None:
    """Refuse Ulysses where the attention heads cannot be shared evenly by the GPUs of a group."""
    if config.sequence_parallel_type == "ulysses" and not can_share_heads(sizes, config.sequence_parallel_size):
        raise ConfigError(
            f"--sequence-parallel-type ulysses: {sizes.num_heads} heads of Q and {sizes.num_key_heads} of K and V "
            f"cannot be shared evenly by {config.sequence_parallel_size} GPUs",
            "Use ring or allgather, or another --sequence-parallel-size.",
        )


def _options(config: SimulateConfig, machine: Machine, model: str) -> SimulateOptions:
    bucket_size = config.bucket_tokens or machine.largest_bucket(config.sequence_parallel_size)
    if bucket_size < 1:
        raise ConfigError(
            f"--model {model}: weights, gradients and optimizer take {machine.state_bytes / 1e9:,.0f} GB of a GPU, and "
            f"{machine.hardware.name} has {machine.usable_bytes / 1e9:,.0f} GB for them.",
            "Use a smaller model, another --hardware, or --zero-stage 3.",
        )
    per_step = config.world_size // config.sequence_parallel_size * config.sequences_per_rank
    packing_length = min(config.packing_length or bucket_size, bucket_size)
    num_steps = config.steps or min(max(_DEFAULT_SEQUENCES // per_step, _MIN_STEPS), _MAX_STEPS)
    resolved = {"bucket_size": bucket_size, "packing_length": packing_length, "num_steps": num_steps}
    return part_of(SimulateOptions, config, machine=machine, **resolved)  # the other fields are those of ``config``


def _lengths_and_targets(
    config: SimulateConfig, options: SimulateOptions, reader: CacheReader | None
) -> tuple[IntArray, IntArray, str]:
    """Return the tokens and labels of each sample, and their source; without a cache, every token has a label."""
    if reader is not None:
        return reader.index.length, reader.index.target_tokens, " ".join(config.cached_dataset)
    if config.lengths is not None:
        lengths = read_lengths(config.lengths)
        return lengths, lengths, config.lengths
    drawn_lengths = _draw_enough_lengths(config, options)
    return drawn_lengths, drawn_lengths, f"lengths as in {config.distribution}"


def _draw_enough_lengths(config: SimulateConfig, options: SimulateOptions) -> IntArray:
    """Draw lengths of ``--distribution``, more than needed, because too long ones are left out later."""
    assert config.distribution is not None  # SimulateConfig requires it without other lengths
    typical_lengths = quantiles(config.distribution, (np.arange(_NUM_TYPICAL) + 0.5) / _NUM_TYPICAL)
    max_length = min(options.longest_trainable, config.max_length or options.longest_trainable)
    num_fitting = int(np.count_nonzero(typical_lengths <= max_length))
    if not num_fitting:
        raise DataError(f"No sample drawn from {config.distribution} fits.", "Raise --bucket-size or --max-length.")
    num_drawn = round(1.05 * options.num_steps * options.sequences_per_step * _NUM_TYPICAL / num_fitting) + 10
    return draw_lengths(config.distribution, num_drawn, seed=config.seed)


def _model_of(requested: str | None, reader: CacheReader | None) -> tuple[str, ModelSizes]:
    """Return the requested model, else the caches' if its sizes can be read, else the default; and its sizes."""
    if not requested and reader is not None:
        model = str(reader.manifests[0].identity.spec["model"])
        try:
            return model, _read_sizes(model)
        except ConfigError:
            pass
    model = requested or _DEFAULT_MODEL
    return model, _read_sizes(model)


def _read_sizes(model: str) -> ModelSizes:
    """Return the layers and widths of a model; a ConfigError if they cannot be read.

    ``model``: name of a preset, such as "8b", or a directory with a ``config.json``.
    """
    config = MODEL_PRESETS[model] if model in MODEL_PRESETS else _read_model_config(model)
    try:
        return ModelSizes.of_config(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--model {model}: its config.json lacks the sizes of the model: {error}") from error


def _read_model_config(directory: str) -> Mapping[str, Any]:
    """Parse ``config.json`` in a directory of a model."""
    path = storage.join(directory, "config.json")
    if not storage.exists(path):
        problem = f"--model {directory}: no config.json in this directory."
        raise ConfigError(problem, f"Give a directory with one, or {', '.join(MODEL_PRESETS)}.")
    with storage.open_read(path) as file:
        try:
            config = load_json(file.read())
        except ValueError as error:
            raise ConfigError(f"--model {directory}: its config.json is not valid JSON: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"--model {directory}: its config.json is a {type(config).__name__}, not an object")
    return config
