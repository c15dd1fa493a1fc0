"""A run on rows as they come, as far as it is decided before torch is imported.

The training steps of a stream, as one rank sees them: no plan tells what a step holds, so ranks add it up.

Before a step each rank tells the others, by one sum of a few numbers, what its packs hold and whether more will come.
A rank whose rows have ended trains empty micro-batches, with zero loss, until all have; the loss stays the mean over
the true target tokens of the step.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from packtool.batch.micro_batch import MicroBatch
from packtool.config.data import EncodeSpec
from packtool.config.packing import PackOptions
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.constants import LEAST_SHARED
from packtool.encode.blocks import check_template, encode_samples, refused_at_first, samples_of
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World
from packtool.planning.cost import CostModel
from packtool.planning.packing import pack_trees
from packtool.rows.read import follow
from packtool.rows.sample import Dropped, all_dropped
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of
from packtool.stream.packs import Added, IntervalSharing, PackStream, StreamedPack, StreamOptions
from packtool.stream.reading import MOST_OPEN, StreamState, read_stream_state, write_stream_state
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.costs import RunCosts
from packtool.train.prepare.figures import RankTokens, StepFigures
from packtool.train.prepare.from_rows import length_of_rows, rows_fingerprint
from packtool.train.prepare.heaviest import with_longest
from packtool.train.prepare.place import with_resumed_version
from packtool.train.prepare.prepared import NumberExchange, PreparedRun, RankStep, ResumePoint, Steps
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.sequence_parallel import axes_of
from packtool.train.prepare.shared_prefixes import WORTH_SHARING, first_pair, sharing_of_stream
from packtool.train.prepare.timeline import OpenTimeline

_TOWER_SUMS = ("vision_tokens", "patch_squares", "audio_tokens")
_SUMS = (
    *("target_tokens", "logits", "whole_tokens", "tokens", "packs", "samples"),
    *("attended", "in_windows", "attended_dense", *_TOWER_SUMS),
    "more",
)


class StreamedSteps(Steps):
    """See ``Steps``.

    Args:
        run: of this rank.
        stream: its packs.
        after: where the stream stands before them.
        log: of rows that were dropped.
        costs: FLOPs of packs.
        exchange: with the other ranks.
    """

    def __init__(
        self,
        run: PreparedRun,
        stream: PackStream,
        after: StreamState,
        log: DropLog,
        costs: RunCosts,
        exchange: NumberExchange,
    ) -> None:
        self.totals: Counter[str] = Counter()
        self._run, self._stream, self._log, self._costs, self._exchange = run, stream, log, costs, exchange
        self._capacity = run.state.packing_length
        self._step = run.start
        self._after = {run.start: after}

    def drawn(self) -> Iterator[RankStep]:
        """See ``Steps``; without end, for other ranks may have more."""
        self._log.begin()
        config = self._run.config
        each = config.per_device_train_batch_size
        packs = iter(self._stream)
        ahead = next(packs, None)
        after = self._after[self._run.start]
        while True:
            taken: list[StreamedPack] = []
            while ahead is not None and len(taken) < each * config.gradient_accumulation_steps:
                taken.append(ahead)
                after = ahead.state
                ahead = next(packs, None)
            micro = [taken[start : start + each] for start in range(0, each * config.gradient_accumulation_steps, each)]
            yield RankStep(
                tuple(MicroBatch([pack.samples for pack in packs]) for packs in micro),
                partial(self._begun, self._counts(taken, is_last=ahead is None), after),
            )

    def _counts(self, packs: list[StreamedPack], *, is_last: bool) -> list[int]:
        """What one rank's packs of a step hold, as in ``_SUMS``."""
        whole = np.array([sample.length for pack in packs for sample in pack.samples], np.int64)
        added = Added.joined([pack.added for pack in packs])
        num_tokens = whole.sum() - added.shared.sum()
        counts = [
            *(sum(pack.num_targets for pack in packs), added.targets.sum(), whole.sum(), num_tokens),
            *(len(packs), len(whole)),
            np.square(whole).sum() - np.square(added.shared).sum(),
            self._costs.model.seen_in_windows(whole, added.shared).sum(),
            sum(pack.num_tokens**2 for pack in packs),
            *((added.media_tokens - added.audio_tokens).sum(), added.patch_squares.sum(), added.audio_tokens.sum()),
            not is_last,
        ]
        return [int(count) for count in counts]

    def _begun(self, counts: list[int], after: StreamState) -> StepFigures:
        """The step is next: what it holds over all ranks.

        Args:
            counts: of this rank, as in ``_SUMS``.
            after: where the stream stands behind its packs.
        """
        sums = dict(zip(_SUMS, self._exchange.sums(counts), strict=True))
        if not sums["packs"]:
            where = f"Rows that were dropped are listed in {self._log.path}."
            raise all_dropped("no sample is left of the rows", self._stream.counts.dropped, self._log.firsts, where)
        self.ended = not sums.pop("more")
        self.totals.update(sums)
        self._after = {self._step: self._after[self._step], self._step + 1: after}
        self._step += 1
        return StepFigures(
            target_tokens=sums["target_tokens"],
            units=sums["samples" if self._run.config.loss_reduction == "sample" else "target_tokens"],
            tokens=sums["tokens"],
            computed_tokens=sums["packs"] * self._capacity,
            attended=sums["attended"],
            attended_dense=sums["attended_dense"],
            flops=_flops(self._costs.model, sums),
            hardware_flops=_flops(self._costs.hardware, sums),
        )

    def save(self, checkpoint: str, step: int) -> None:
        """See ``Steps``; every rank writes its own part: the step that was begun last, or the one before, is done."""
        world = self._run.world
        os.makedirs(checkpoint, exist_ok=True)
        if world.share_rank == 0:
            write_stream_state(checkpoint, world.data.rank, self._after[step])

    def counted(self, result: TrainResult) -> TrainResult:
        """See ``Steps``; with what was read, over all ranks."""
        counts = self._stream.counts.total(self._exchange.gathered(self._stream.counts))
        totals, config = self.totals, self._run.config
        each = self._run.world.data.size * config.gradient_accumulation_steps * config.per_device_train_batch_size
        return dataclasses.replace(
            result,
            num_samples=totals["samples"],
            num_packs=totals["packs"],
            samples_per_pack=totals["samples"] / max(totals["packs"], 1),
            fill=totals["tokens"] / max(totals["packs"] * self._capacity, 1),
            target_tokens=totals["target_tokens"],
            num_shared_tokens=totals["whole_tokens"] - totals["tokens"],
            steps_without_packing=-(-totals["samples"] // each),
            dropped=counts.dropped,
            parts_left_out=counts.parts_left_out,
        )


def _flops(cost: CostModel, sums: Mapping[str, int]) -> float:
    towers = cost.towers(*(np.array(sums[name]) for name in _TOWER_SUMS))
    attention = cost.attention_of(np.array(sums["attended"]), np.array(sums["in_windows"]))
    return float(cost(np.array(sums["tokens"]), attention, sums["logits"], towers))


class DropLog:
    """``OUTPUT_DIR/dropped-00000.jsonl``: a line for each row that a rank could not use.

    Args:
        output_dir: of the run.
        world: this rank among the others.
        start: where its stream goes on: the lines of rows that were met before stay, those behind go.

    Attributes:
        firsts: of each reason, the first row that this run met.
    """

    def __init__(self, output_dir: str, world: World, start: StreamState | None) -> None:
        self.path = os.path.join(output_dir, f"dropped-{world.data.rank:05d}.jsonl")
        self.firsts: dict[str, str] = {}
        self._writes = world.share_rank == 0
        noted = () if start is None else (start.counts.dropped, start.counts.parts_left_out)
        self._kept = sum(sum(counts.values()) for counts in noted)

    def __call__(self, item: Dropped) -> None:
        """Append a line."""
        self.firsts.setdefault(item.reason, item.shown)
        if not self._writes:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(item.to_json())

    def begin(self) -> None:
        """Keep the lines of rows that this run does not meet again, and no others."""
        if not self._writes:
            return
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        lines = []
        if self._kept and os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                lines = list(islice(file, self._kept))
        if lines or os.path.exists(self.path):
            with open(self.path, "w", encoding="utf-8") as file:
                file.writelines(lines)


# Any number of processes makes the same packs, and a stream has no windows: an interval is one.
_CHANGES_NO_PACK = ("packing_num_proc", "packing_window")


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedRun(PreparedRun):
    """A run on rows that are encoded and packed while it trains.

    Args:
        specs: files of all rows.
        spec: how they are encoded.
        options: how they are packed.
        costs: FLOPs of packs.
        stream: where this rank's packs go on; None for the beginning.
        sharing: how samples of an interval share prefixes; None where all are computed whole.
    """

    specs: Sequence[SourceSpec]
    spec: EncodeSpec
    options: StreamOptions
    costs: RunCosts
    stream: StreamState | None
    sharing: IntervalSharing | None

    def expected(self) -> TrainResult:
        """See ``PreparedRun``; next to nothing."""
        return TrainResult(
            num_samples=0,
            filtered=0,
            num_packs=0,
            samples_per_pack=0.0,
            fill=0.0,
            packing=True,
            max_length=self.spec.max_length,
            packing_length=self.options.packing_length,
            steps=self.timeline.num_steps,
            steps_without_packing=0,
            num_empty_micro_batches=0,
            num_processes=self.world.size,
            target_tokens=0,
            output_dir=self.config.output_dir,
            resumed_from=self.resume_point.checkpoint,
            streaming=True,
        )

    def lines(self, expected: TrainResult) -> Iterator[str]:
        """See ``PreparedRun``."""
        options, world = self.options, self.world
        yield (
            f"streaming {len(self.specs)} file{'s' if len(self.specs) > 1 else ''} of rows, samples of up to "
            f"{self.spec.max_length:,} tokens; nobody has counted them"
        )
        yield (
            f"packing: yes; packing length: {options.packing_length:,}, {options.packing_interval:,} samples at a "
            f"time, drawn from a buffer of {options.shuffle_buffer_size:,}; "
            f"{world.size} process{'es' if world.size > 1 else ''} with "
            f"{options.dataset_num_proc} worker{'s' if options.dataset_num_proc > 1 else ''} each"
        )
        if self.sharing is not None:
            where = f", where that saves more than {WORTH_SHARING:.0%} of its tokens" if self.sharing.worth else ""
            yield f"shared prefixes: computed once within each interval{where} (--share-prefix false: never)"
        yield f"optimizer steps: at most {expected.steps:,}"

    def media_tokens(self) -> float:
        """See ``PreparedRun``; all tokens, for nobody knows, or none where the model sees nothing."""
        sees = self.media_limits.image is not None
        return float(self.options.packing_length * self.config.per_device_train_batch_size * sees)

    def heaviest(self, kind: int = 0) -> tuple[RankTokens, ...]:
        """See ``PreparedRun``; all tokens are a picture's, for nobody knows."""
        most, limits = int(self.media_tokens()), self.media_limits.image
        looked_at = None
        if limits is not None and self.world.sequence_parallel_size > 1:
            largest = min(limits.max_pixels // limits.pixels_per_token, most)
            looked_at = max(largest, -(-most // self.world.sequence_parallel_size))
        return with_longest(self.sized, self.files.config, RankTokens(computed=1, vision=most, looked_at=looked_at))

    def first_samples(self, most: int) -> list[EncodedSample]:
        """See ``PreparedRun``; the shortest ones of the first block of the first file, or two that share a prefix."""
        source, blocks = follow(self.specs[0])
        block = next(iter(blocks), None)
        if block is None:
            return []
        group = list(samples_of(source, [block], may_hold_secrets=False))
        found = [
            item for item in encode_samples(group, Encoder(self.spec, self.files)) if not isinstance(item, Dropped)
        ]
        alike = [sample for samples in found for sample in samples]
        trees = self.sharing.found(alike, self.options.packing_length) if self.sharing is not None and alike else None
        if trees is not None:
            lengths = np.array([sample.length for sample in alike], np.int32)
            pair = first_pair(pack_trees(trees.trees, lengths, self.options.packing_length, seed=self.options.seed))
            if pair is not None:
                return [alike[number] for number in pair]
        return sorted(alike, key=lambda sample: sample.length)[:most]

    @property
    def read(self) -> Callable[[Any], EncodedSample]:
        """See ``PreparedRun``; micro-batches have the samples themselves."""
        return _as_it_is

    def names(self, micro_batch: MicroBatch) -> list[str]:
        """See ``PreparedRun``."""
        return [f"row {sample.row} of {sample.source}" for sample in micro_batch.samples]

    def words(self, micro_batch: MicroBatch) -> str:
        """``samples a.json:3 a.json:17``: files and rows."""
        return "samples " + " ".join(f"{sample.source}:{sample.row}" for sample in micro_batch.samples)

    def steps(self, exchange: NumberExchange) -> Steps:
        """See ``PreparedRun``; no plan tells what a step holds, so ranks add it up."""
        log = DropLog(self.config.output_dir, self.world, self.stream)
        data = self.world.data
        stream = PackStream(
            self.specs,
            self.spec,
            self.options,
            rank=data.rank,
            world_size=data.size,
            start=self.stream,
            sharing=self.sharing,
            log=log,
        )
        return StreamedSteps(self, stream, self.stream or StreamState(), log, self.costs, exchange)


def _as_it_is(sample: EncodedSample) -> EncodedSample:
    return sample


def prepare_stream(config: TrainConfig, world: World) -> StreamedRun:
    """Check that model, rows, options and checkpoint fit; reads the first rows of the first files.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: naming what does not fit, and what to do.
    """
    config = with_resumed_version(config)
    assert config.max_steps is not None, "checked with the settings"
    files = ModelFiles.load(config.model, config.chat_template)
    max_length = length_of_rows(config, files)
    asked = config.export_config("", max_length)
    encoder = Encoder(asked.encode_spec, files)  # refuses what cannot be encoded
    specs = sources_of(asked)
    check_template(config.model, files, (follow(spec) for spec in specs[:MOST_OPEN]))
    refusals = [refused_at_first(*follow(spec)) for spec in specs[:MOST_OPEN]]
    packing_length = config.packing_length or max_length
    sharing, not_shared = sharing_of_stream(config, files.config)
    state = RunState.of(
        config,
        plan="stream",
        cache=rows_fingerprint(asked, files, specs, with_times=False),
        max_length=max_length,
        packing_length=packing_length,
        world_size=world.data.size,
        streaming=_settings(config, sharing),
        shares_prefixes=sharing is not None,
    )
    resume_point = ResumePoint.of(config)
    resume_point.check(state, world)
    return StreamedRun(
        config=config,
        world=world,
        files=files,
        media_limits=encoder.limits,
        timeline=OpenTimeline(config.max_steps),
        state=state,
        resume_point=resume_point,
        axes=axes_of(config, world, files, np.array([max_length]), trained=True),
        notes=(
            *([] if not_shared is None else [not_shared]),
            *encoder.remarks,
            *[line for line in refusals if line is not None][:1],
            *resume_point.notes,
        ),
        least_shared=None if sharing is None else LEAST_SHARED,
        specs=specs,
        spec=asked.encode_spec,
        options=_options(config, packing_length),
        costs=RunCosts.of(config, files.config),
        stream=read_stream_state(resume_point.checkpoint, world.data.rank)
        if resume_point.checkpoint is not None
        else None,
        sharing=sharing,
    )


def _options(config: TrainConfig, packing_length: int) -> StreamOptions:
    return part_of(
        StreamOptions,
        config,
        packing_length=packing_length,
        shuffle_buffer_size=config.shuffle_buffer_size if config.shuffle else 1,
        num_epochs=int(config.num_train_epochs),
    )


def _settings(config: TrainConfig, sharing: IntervalSharing | None) -> str:
    """What else decides the packs of a stream, in one line, which a checkpoint keeps."""
    pack_names = [field.name for field in dataclasses.fields(PackOptions) if field.name not in _CHANGES_NO_PACK]
    names = ("packing_interval", "shuffle_buffer_size", *pack_names, "num_train_epochs", "loss_reduction")
    names += ("share_prefix", "max_rows_per_tree") if sharing is not None else ()
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)
