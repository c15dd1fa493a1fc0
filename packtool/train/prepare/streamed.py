"""Rows that are encoded and packed while a run trains, and the steps of one rank on them.

There is no plan, so ranks add up the figures of each step: before the step, one all-reduce of a few numbers sums the
figures of their packs and tells whether any rank has more rows. A rank without rows trains empty micro-batches with
zero loss until all ranks have ended; the loss stays the mean over the target tokens of the step.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from packtool.batch.micro_batch import MicroBatch
from packtool.config.data import EncodeSpec
from packtool.config.packing import PackOptions
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.constants import MIN_SHARED
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder, check_template, encode_samples, first_row_error
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World
from packtool.planning.cost import CostModel
from packtool.planning.packing import pack_trees
from packtool.rows.read import follow, samples_of
from packtool.rows.sample import Dropped, all_dropped
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of
from packtool.stream.packs import IntervalSharing, PackStream, SampleAmounts, StreamedPack, StreamOptions
from packtool.stream.reading import MAX_OPEN_SOURCES, StreamState, write_stream_state
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.costs import RunCosts
from packtool.train.prepare.figures import RankStep, RankTokens, StepFigures, Steps, longest_micro_batches
from packtool.train.prepare.from_rows import length_of_rows, rows_fingerprint
from packtool.train.prepare.shared_prefixes import MIN_SAVING, first_pair, sharing_of_stream
from packtool.train.prepare.timeline import OpenTimeline

_UNRECORDED_OPTIONS = ("packing_num_proc", "packing_window")
"""Options that do not change the packs of a stream: an interval is one window, packed by any number of processes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedSource:
    """The rows of a run that are encoded and packed while it trains.

    Args:
        sharing: of prefixes by samples of an interval; None if every sample is computed in full.
        start_position: position of this rank in the rows at step ``start``; None for the beginning.
    """

    config: TrainConfig
    world: World
    files: ModelFiles
    media_limits: MediaLimits
    row_files: Sequence[SourceSpec]
    encode_spec: EncodeSpec
    options: StreamOptions
    sharing: IntervalSharing | None
    start: int = 0
    start_position: StreamState | None = None

    @property
    def timeline(self) -> OpenTimeline:
        """The steps of the run, without epochs."""
        assert self.config.max_steps is not None, "checked with the settings"
        return OpenTimeline(self.config.max_steps)

    @property
    def min_shared(self) -> int | None:
        return None if self.sharing is None else MIN_SHARED

    @property
    def logs_channels(self) -> bool:
        return self.config.enable_channel_loss

    def expected(self) -> dict[str, Any]:
        """The fields of a ``TrainResult`` that are known before the first step; numbers of samples are 0."""
        unknown = ("num_samples", "filtered", "num_packs", "steps_without_packing", "num_empty_micro_batches")
        return {
            **dict.fromkeys((*unknown, "target_tokens"), 0),
            **dict.fromkeys(("samples_per_pack", "fill"), 0.0),
            "packing": True,
            "max_length": self.encode_spec.max_length,
            "packing_length": self.options.packing_length,
            "streaming": True,
        }

    def lines(self, config: TrainConfig) -> Iterator[str]:
        """Describe rows, packing and shared prefixes."""
        options, world, num_files = self.options, self.world, len(self.row_files)
        yield (
            f"streaming {num_files} file{'s' if num_files > 1 else ''} of rows (number of rows unknown), "
            f"samples of up to {self.encode_spec.max_length:,} tokens"
        )
        yield (
            f"packing: yes; packing length: {options.packing_length:,}, {options.packing_interval:,} samples at a "
            f"time from a shuffle buffer of {options.shuffle_buffer_size:,}; "
            f"{world.size} process{'es' if world.size > 1 else ''} with "
            f"{options.dataset_num_proc} worker{'s' if options.dataset_num_proc > 1 else ''} each"
        )
        if self.sharing is not None:
            where = f", where that saves more than {MIN_SAVING:.0%} of its tokens" if self.sharing.min_saving else ""
            yield f"shared prefixes: computed once within each interval{where} (--share-prefix false: never)"
        yield f"optimizer steps: at most {self.timeline.num_steps:,}"

    def media_tokens(self) -> float:
        """Upper bound of the media tokens of a micro-batch: all of its tokens; 0 for a text model."""
        has_images = self.media_limits.image is not None
        return float(self.options.packing_length * self.config.per_device_train_batch_size * has_images)

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """Packing length, and number of ranks that share a sequence, of all steps."""
        return [(self.options.packing_length, self.world.sequence_parallel_size)]

    def peak_memory_batches(self, config: TrainConfig, number: int) -> tuple[RankTokens, ...]:
        """The micro-batches of a rank that may need most memory: all tokens are those of images."""
        num_media, limits = int(self.media_tokens()), self.media_limits.image
        num_local, size = None, self.world.sequence_parallel_size
        if limits is not None and size > 1:
            largest = min(limits.max_pixels // limits.pixels_per_token, num_media)
            num_local = max(largest, -(-num_media // size))
        return longest_micro_batches(
            config, self.files.config, RankTokens(computed=0, vision=num_media, num_local_vision_tokens=num_local)
        )

    def first_samples(self, max_samples: int) -> list[EncodedSample]:
        """The shortest samples of the first block of rows, at most ``max_samples``; or two that share a prefix."""
        source, blocks = follow(self.row_files[0])
        block = next(iter(blocks), None)
        if block is None:
            return []
        rows = list(samples_of(source, [block], may_hold_secrets=False))
        encoded = encode_samples(rows, Encoder(self.encode_spec, self.files))
        samples = [sample for item in encoded if not isinstance(item, Dropped) for sample in item]
        return self._first_pair(samples) or sorted(samples, key=lambda sample: sample.length)[:max_samples]

    def _first_pair(self, samples: Sequence[EncodedSample]) -> list[EncodedSample]:
        """The two shortest neighbors in packs that share a prefix; empty if no two do."""
        if self.sharing is None or not samples:
            return []
        capacity = self.options.packing_length
        trees = self.sharing.find_trees(samples, capacity)
        if trees is None:
            return []
        lengths = np.array([sample.length for sample in samples], np.int32)
        pair = first_pair(pack_trees(trees[0], lengths, capacity, seed=self.options.seed))
        return [] if pair is None else [samples[number] for number in pair]

    @property
    def read(self) -> Callable[[Any], EncodedSample]:
        """The identity: micro-batches hold the samples themselves."""
        return _unchanged

    def names(self, micro_batch: MicroBatch) -> list[str]:
        """The row and file of each sample of a micro-batch, for messages."""
        return [f"row {sample.row} of {sample.source}" for sample in micro_batch.samples]

    def debug_text(self, micro_batch: MicroBatch) -> str:
        """``samples a.json:3 a.json:17``, for ``--debug``: files and rows."""
        return "samples " + " ".join(f"{sample.source}:{sample.row}" for sample in micro_batch.samples)


def _unchanged(sample: EncodedSample) -> EncodedSample:
    return sample


def open_stream(config: TrainConfig, world: World) -> tuple[StreamedSource, RunState, list[str]]:
    """Open the rows of a run that encodes and packs them while it trains; check the model, options and first rows.

    Returns:
        The source of the samples; the run's state before its first step; and messages for the user.
    """
    files = ModelFiles.load(config.model, config.chat_template, config.chat_template_kwargs)
    max_length = length_of_rows(config, files)
    # Rows are read and encoded as by ``packtool export`` with the same options, but not written.
    export_config = config.export_config(output_dir="", max_length=max_length)
    encoder = Encoder(export_config.encode_spec, files)  # may raise if the model does not support the options
    row_files = sources_of(export_config)
    first_row_warning = _check_first_rows(config.model, files, row_files[:MAX_OPEN_SOURCES])
    sharing, no_sharing_reason = sharing_of_stream(config, files.config)
    source = StreamedSource(
        config=config,
        world=world,
        files=files,
        media_limits=encoder.limits,
        row_files=row_files,
        encode_spec=export_config.encode_spec,
        options=_stream_options(config, max_length),
        sharing=sharing,
    )
    # A checkpoint may be resumed only with the same rows. Times of files are ignored, so copies may be used.
    fingerprint = rows_fingerprint(export_config, files, row_files, with_times=False)
    initial_state = _initial_run_state(source, fingerprint)

    warnings = [no_sharing_reason, *encoder.warnings, first_row_warning]
    return source, initial_state, [warning for warning in warnings if warning is not None]


def _stream_options(config: TrainConfig, max_length: int) -> StreamOptions:
    return part_of(
        StreamOptions,
        config,
        packing_length=config.packing_length or max_length,
        shuffle_buffer_size=config.shuffle_buffer_size if config.shuffle else 1,
        num_epochs=int(config.num_train_epochs),
    )


def _check_first_rows(model: str, files: ModelFiles, specs: Sequence[SourceSpec]) -> str | None:
    """Check that the chat template renders the first rows of each file; return the first warning on them."""
    check_template(model, files, (follow(spec) for spec in specs))
    row_warnings = [first_row_error(*follow(spec)) for spec in specs]
    return next((warning for warning in row_warnings if warning is not None), None)


def _recorded_options(source: StreamedSource) -> list[str]:
    """The names of options that must not change when the run resumes."""
    pack_options = [option.name for option in dataclasses.fields(PackOptions)]
    pack_options = [name for name in pack_options if name not in _UNRECORDED_OPTIONS]
    names = ["packing_interval", "shuffle_buffer_size", *pack_options, "num_train_epochs", "loss_reduction"]
    if source.sharing is not None:
        names += ["share_prefix", "max_rows_per_tree"]
    return names


def _initial_run_state(source: StreamedSource, fingerprint: str) -> RunState:
    """The state of a run on a stream before its first step."""
    config = source.config
    return RunState.of(
        config,
        plan="stream",
        cache=fingerprint,  # of the rows, because there is no cache
        max_length=source.encode_spec.max_length,
        packing_length=source.options.packing_length,
        world_size=source.world.data.size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        streaming=", ".join(f"{name} {getattr(config, name)}" for name in _recorded_options(source)),
        shares_prefixes=source.sharing is not None,
    )


class CountExchange(Protocol):
    """Exchange of counts between ranks; every rank calls each method at the same step."""

    def sums(self, counts: Sequence[int]) -> list[int]:
        """Each number summed over the data-parallel ranks."""

    def gathered(self, value: Any) -> list[Any]:
        """The values of all data-parallel ranks, by rank."""


class StreamedSteps(Steps):
    """The steps of one rank of a stream; figures of a step are exchanged with the other ranks when it begins."""

    def __init__(self, source: StreamedSource, config: TrainConfig, exchange: CountExchange) -> None:
        """Open the stream where the run starts or resumes; ``exchange`` sums the counts of a step over all ranks."""
        self._source = source
        self._exchange = exchange
        self._packing_length = source.options.packing_length
        self._batch_size = config.per_device_train_batch_size  # packs of a micro-batch
        self._packs_per_step = self._batch_size * config.gradient_accumulation_steps  # of this rank
        self._costs = RunCosts.of(source.config, source.files.config)
        self._drop_log = DropLog(config.output_dir, source.world, source.start_position)
        self._stream = PackStream(
            source.row_files,
            source.encode_spec,
            source.options,
            rank=source.world.data.rank,
            world_size=source.world.data.size,
            start=source.start_position,
            sharing=source.sharing,
            log=self._drop_log,
        )
        self._num_steps_begun = source.start  # including steps before the run was resumed
        self.totals: Counter[str] = Counter()  # sums of ``_counts`` over the steps that this process has begun
        # This rank's position in the rows after each of the last two steps that have begun, by number of steps. When a
        # checkpoint is written, the last one may not be done.
        self._positions = {source.start: source.start_position or StreamState()}

    def rank_steps(self) -> Iterator[RankStep]:
        """Yield steps without end: after its last row, a rank yields empty steps, because others may have more rows."""
        self._drop_log.begin()
        stream = iter(self._stream)
        next_pack = next(stream, None)
        position = self._positions[self._source.start]
        while True:
            packs: list[StreamedPack] = []
            while next_pack is not None and len(packs) < self._packs_per_step:
                packs.append(next_pack)
                position = next_pack.state
                next_pack = next(stream, None)
            counts = self._counts(packs, is_last=next_pack is None)
            yield RankStep(self._micro_batches(packs), partial(self._begin, counts, position))

    def _micro_batches(self, packs: Sequence[StreamedPack]) -> tuple[MicroBatch, ...]:
        """Divide the packs of a step into its micro-batches; the last ones may have fewer packs, or none."""
        starts = range(0, self._packs_per_step, self._batch_size)
        return tuple(MicroBatch([pack.samples for pack in packs[start : start + self._batch_size]]) for start in starts)

    def _counts(self, packs: list[StreamedPack], *, is_last: bool) -> dict[str, int]:
        """Count the tokens, samples and other work of this rank's packs of a step, by name.

        The counts are summed over the ranks later. ``is_last`` is true if this rank has no packs for later steps.
        """
        samples = [sample for pack in packs for sample in pack.samples]
        lengths = np.array([sample.length for sample in samples], np.int64)
        # If samples begin with the same tokens, only one of them computes and counts these.
        amounts = SampleAmounts.joined([pack.amounts for pack in packs])
        cost = self._costs.without_recomputation
        vision_tokens = amounts.media_tokens - amounts.audio_tokens
        padded_vision_tokens = cost.padded_tokens(vision_tokens, amounts.patch_squares, amounts.picture_squares)
        patch_squares = cost.squares_of(padded_vision_tokens, amounts.patch_squares)
        counts = {
            "packs": len(packs),
            "samples": len(samples),
            "target_tokens": sum(pack.num_targets for pack in packs),
            "unshared_tokens": lengths.sum(),  # as if every sample computed all of its tokens
            "tokens": (lengths - amounts.shared_tokens).sum(),
            "logits": amounts.targets.sum(),
            "vision_tokens": padded_vision_tokens.sum(),
            "patch_squares": patch_squares.sum(),
            "audio_tokens": amounts.audio_tokens.sum(),
            "attended_pictures": (lengths * amounts.patch_squares).sum() if cost.per_cross else 0,  # by cross-attention
            **self._attention_counts(packs, lengths, amounts.shared_tokens),
            "ranks_with_more": 0 if is_last else 1,
        }
        return {name: int(count) for name, count in counts.items()}

    def _attention_counts(
        self, packs: Sequence[StreamedPack], lengths: npt.NDArray[np.int64], shared_tokens: npt.NDArray[np.int64]
    ) -> dict[str, int]:
        """Sums of squared lengths, to which the work of attention is proportional, over samples (N,) and over packs."""
        cost = self._costs.without_recomputation
        return {
            "attended": (np.square(lengths) - np.square(shared_tokens)).sum(),
            "attended_in_windows": cost.window_squares(lengths, shared_tokens).sum(),  # in layers with windows
            "attended_dense": sum(pack.num_tokens**2 for pack in packs),
        }

    def _begin(self, counts: dict[str, int], position: StreamState) -> StepFigures:
        """Begin a step: sum its ``counts`` over all ranks; ``position`` is that of the stream after the step."""
        sums = dict(zip(counts, self._exchange.sums(list(counts.values())), strict=True))
        if not sums["packs"]:
            where = f"Rows that were dropped are listed in {self._drop_log.path}."
            raise all_dropped(
                "no sample is left to train on", self._stream.counts.dropped, self._drop_log.firsts, where
            )
        self.ended = not sums.pop("ranks_with_more")
        self.totals.update(sums)  # a Counter adds
        previous = self._num_steps_begun
        self._num_steps_begun += 1
        self._positions = {previous: self._positions[previous], self._num_steps_begun: position}
        return self._step_figures(sums)

    def _step_figures(self, sums: Mapping[str, int]) -> StepFigures:
        """The figures of a step from its counts over all ranks."""
        uses_samples = self._source.config.loss_reduction == "sample"
        return StepFigures(
            target_tokens=sums["target_tokens"],
            samples=sums["samples"],
            units=sums["samples"] if uses_samples else sums["target_tokens"],
            tokens=sums["tokens"],
            computed_tokens=sums["packs"] * self._packing_length,
            attended=sums["attended"],
            attended_dense=sums["attended_dense"],
            flops=_flops_of(self._costs.without_recomputation, sums),
            hardware_flops=_flops_of(self._costs.with_recomputation, sums),
        )

    def save(self, checkpoint: str, step: int) -> None:
        """Write this rank's position in the stream after ``step`` steps; the last step begun may be one later."""
        world = self._source.world
        os.makedirs(checkpoint, exist_ok=True)
        if world.share_rank == 0:
            write_stream_state(checkpoint, world.data.rank, self._positions[step])

    def final_counts(self) -> dict[str, Any]:
        """Counts of the rows, samples and packs of all ranks."""
        counts = self._stream.counts.total(self._exchange.gathered(self._stream.counts))
        totals = self.totals
        return {
            "num_samples": totals["samples"],
            "num_packs": totals["packs"],
            "samples_per_pack": totals["samples"] / max(totals["packs"], 1),
            "fill": totals["tokens"] / max(totals["packs"] * self._packing_length, 1),
            "target_tokens": totals["target_tokens"],
            "num_shared_tokens": totals["unshared_tokens"] - totals["tokens"],
            "steps_without_packing": -(-totals["samples"] // (self._source.world.data.size * self._packs_per_step)),
            "dropped": counts.dropped,
            "parts_left_out": counts.parts_left_out,
        }


def _flops_of(cost: CostModel, counts: Mapping[str, int]) -> float:
    """FLOPs of packs with these counts (``StreamedSteps._counts``)."""
    arrays = {name: np.array(count) for name, count in counts.items()}
    towers = cost.towers(arrays["vision_tokens"], arrays["patch_squares"], arrays["audio_tokens"])
    attention = cost.attention_of(arrays["attended"], arrays["attended_in_windows"])
    attention += cost.per_cross * counts["attended_pictures"]
    return float(cost(arrays["tokens"], attention, counts["logits"], towers))


class DropLog:
    """Writer of ``OUTPUT_DIR/dropped-00000.jsonl``, with a line for each row that a rank could not use.

    Lines of rows before ``start``, where the stream resumes, stay; later ones are removed. ``firsts`` has the first row
    of each reason, as a message.
    """

    def __init__(self, output_dir: str, world: World, start: StreamState | None) -> None:
        self.path = os.path.join(output_dir, f"dropped-{world.data.rank:05d}.jsonl")
        self.firsts: dict[str, str] = {}
        self._writes = world.share_rank == 0
        logged = () if start is None else (start.counts.dropped, start.counts.parts_left_out)
        self._kept = sum(sum(counts.values()) for counts in logged)

    def __call__(self, item: Dropped) -> None:
        self.firsts.setdefault(item.reason, item.summary)
        if not self._writes:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(item.to_json())

    def begin(self) -> None:
        """Remove the lines of rows that this run reads again."""
        if not self._writes:
            return
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                lines = list(islice(file, self._kept))
            with open(self.path, "w", encoding="utf-8") as file:
                file.writelines(lines)
