"""A run on rows as they come, as far as it is decided before torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool.batch.micro_batch import MicroBatch
from packtool.config.export import EncodeSpec
from packtool.config.packing import PackOptions
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.constants import LEAST_SHARED
from packtool.encode.blocks import check_template, encode_samples, refused_at_first, samples_of
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World
from packtool.plan.packing import pack_trees
from packtool.rows.sample import Dropped
from packtool.rows.scan import follow
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of
from packtool.stream.packs import PackStream, StreamOptions
from packtool.stream.reading import MOST_OPEN
from packtool.stream.sharing import IntervalSharing
from packtool.stream.state import StreamState, read_stream_state
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.costs import RunCosts
from packtool.train.prepare.from_rows import length_of_rows, rows_fingerprint
from packtool.train.prepare.heaviest import with_longest
from packtool.train.prepare.place import with_resumed_version
from packtool.train.prepare.prepared import Beginning, NumberExchange, PreparedRun, Steps
from packtool.train.prepare.rank_tokens import RankTokens
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.schedule import OpenSchedule
from packtool.train.prepare.sequence_parallel import axes_of
from packtool.train.prepare.shared_prefixes import WORTH_SHARING, first_pair, sharing_of_stream
from packtool.train.prepare.stream_steps import DropLog, StreamedSteps

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
            steps=self.schedule.num_steps,
            steps_without_packing=0,
            num_empty_micro_batches=0,
            num_processes=self.world.size,
            target_tokens=0,
            output_dir=self.config.output_dir,
            resumed_from=self.beginning.checkpoint,
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
    beginning = Beginning.of(config)
    beginning.check(state, world)
    return StreamedRun(
        config=config,
        world=world,
        files=files,
        media_limits=encoder.limits,
        schedule=OpenSchedule(config.max_steps),
        state=state,
        beginning=beginning,
        axes=axes_of(config, world, files, np.array([max_length]), trained=True),
        notes=(
            *([] if not_shared is None else [not_shared]),
            *encoder.remarks,
            *[line for line in refusals if line is not None][:1],
            *beginning.notes,
        ),
        least_shared=None if sharing is None else LEAST_SHARED,
        specs=specs,
        spec=asked.encode_spec,
        options=_options(config, packing_length),
        costs=RunCosts.of(config, files.config),
        stream=read_stream_state(beginning.checkpoint, world.data.rank) if beginning.checkpoint is not None else None,
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
