"""Rows that are encoded and packed while a run trains, as far as they are known before torch is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool.batch.micro_batch import MicroBatch
from packtool.config.data import EncodeSpec
from packtool.config.packing import PackOptions
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.constants import MIN_SHARED
from packtool.encode.blocks import check_template, encode_samples, first_row_error, samples_of
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World
from packtool.planning.packing import pack_trees
from packtool.rows.read import follow
from packtool.rows.sample import Dropped
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of
from packtool.stream.packs import IntervalSharing, StreamOptions
from packtool.stream.reading import MAX_OPEN_SOURCES, StreamState
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.from_rows import length_of_rows, rows_fingerprint
from packtool.train.prepare.peak_memory import with_longest
from packtool.train.prepare.shared_prefixes import MIN_SAVING, first_pair, sharing_of_stream
from packtool.train.prepare.timeline import OpenTimeline

# Any number of processes makes the same packs, and a stream has no windows: an interval is one.
_CHANGES_NO_PACK = ("packing_num_proc", "packing_window")


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedSource:
    """Rows that one rank encodes and packs while it trains.

    Args:
        config: of the run.
        world: this process among the others.
        files: of the model.
        media_limits: that pixels and sounds are loaded with.
        specs: files of all rows.
        spec: how they are encoded.
        options: how they are packed.
        sharing: how samples of an interval share prefixes; None if every sample is computed whole.
        start: the first step to train.
        stream: position of this rank at ``start``; None for the beginning.
    """

    config: TrainConfig
    world: World
    files: ModelFiles
    media_limits: MediaLimits
    specs: Sequence[SourceSpec]
    spec: EncodeSpec
    options: StreamOptions
    sharing: IntervalSharing | None
    start: int = 0
    stream: StreamState | None = None

    @property
    def timeline(self) -> OpenTimeline:
        """The steps of the run, without epochs."""
        assert self.config.max_steps is not None, "checked with the settings"
        return OpenTimeline(self.config.max_steps)

    @property
    def min_shared(self) -> int | None:
        """Tokens that a prefix must have to be computed once; None if every sample is computed whole."""
        return None if self.sharing is None else MIN_SHARED

    @property
    def logs_channels(self) -> bool:
        """True if losses are logged by channel."""
        return self.config.enable_channel_loss

    def expected(self) -> dict[str, Any]:
        """The fields of a ``TrainResult`` that are known before the first step: next to nothing."""
        unknown = ("num_samples", "filtered", "num_packs", "steps_without_packing", "num_empty_micro_batches")
        return {
            **dict.fromkeys((*unknown, "target_tokens"), 0),
            **dict.fromkeys(("samples_per_pack", "fill"), 0.0),
            "packing": True,
            "max_length": self.spec.max_length,
            "packing_length": self.options.packing_length,
            "streaming": True,
        }

    def lines(self, config: TrainConfig) -> Iterator[str]:
        """Describe rows, packing and shared prefixes."""
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
            where = f", where that saves more than {MIN_SAVING:.0%} of its tokens" if self.sharing.worth else ""
            yield f"shared prefixes: computed once within each interval{where} (--share-prefix false: never)"
        yield f"optimizer steps: at most {self.timeline.num_steps:,}"

    def media_tokens(self) -> float:
        """Upper bound of the media tokens of one rank's micro-batch: all of its tokens; 0 for a model of text."""
        has_images = self.media_limits.image is not None
        return float(self.options.packing_length * self.config.per_device_train_batch_size * has_images)

    @property
    def step_shapes(self) -> list[tuple[int, int]]:
        """Packing length, and number of ranks that share a sequence, of all steps."""
        return [(self.options.packing_length, self.world.sequence_parallel_size)]

    def peak_memory_batches(self, config: TrainConfig, number: int) -> tuple[RankTokens, ...]:
        """The micro-batches of one rank that may need most memory: all tokens are a picture's."""
        num_media, limits = int(self.media_tokens()), self.media_limits.image
        num_local, size = None, self.world.sequence_parallel_size
        if limits is not None and size > 1:
            largest = min(limits.max_pixels // limits.pixels_per_token, num_media)
            num_local = max(largest, -(-num_media // size))
        return with_longest(
            config, self.files.config, RankTokens(computed=1, vision=num_media, num_local_vision_tokens=num_local)
        )

    def first_samples(self, max_samples: int) -> list[EncodedSample]:
        """The shortest samples of the first block of the first file, or two that share a prefix."""
        source, blocks = follow(self.specs[0])
        block = next(iter(blocks), None)
        if block is None:
            return []
        read = list(samples_of(source, [block], may_hold_secrets=False))
        encoded = encode_samples(read, Encoder(self.spec, self.files))
        samples = [sample for item in encoded if not isinstance(item, Dropped) for sample in item]
        capacity = self.options.packing_length
        trees = self.sharing.find_trees(samples, capacity) if self.sharing is not None and samples else None
        if trees is not None:
            lengths = np.array([sample.length for sample in samples], np.int32)
            pair = first_pair(pack_trees(trees[0], lengths, capacity, seed=self.options.seed))
            if pair is not None:
                return [samples[number] for number in pair]
        return sorted(samples, key=lambda sample: sample.length)[:max_samples]

    @property
    def read(self) -> Callable[[Any], EncodedSample]:
        """The identity: micro-batches hold the samples themselves."""
        return _unchanged

    def names(self, micro_batch: MicroBatch) -> list[str]:
        """The origin of each sample of a micro-batch: its row and file."""
        return [f"row {sample.row} of {sample.source}" for sample in micro_batch.samples]

    def words(self, micro_batch: MicroBatch) -> str:
        """``samples a.json:3 a.json:17``, for ``--debug``: files and rows."""
        return "samples " + " ".join(f"{sample.source}:{sample.row}" for sample in micro_batch.samples)

    def stage_line(self, step: int) -> str | None:
        """None: a stream has no stages."""
        return None


def _unchanged(sample: EncodedSample) -> EncodedSample:
    return sample


def open_stream(config: TrainConfig, world: World) -> tuple[StreamedSource, RunState, list[str]]:
    """Check that model, rows and options fit; reads the first rows of the first files.

    Returns:
        the rows from the beginning, the state of a run that starts there, and messages for the user.
    """
    files = ModelFiles.load(config.model, config.chat_template)
    max_length = length_of_rows(config, files)
    export = config.export_config("", max_length)
    encoder = Encoder(export.encode_spec, files)  # refuses what cannot be encoded
    specs = sources_of(export)
    check_template(config.model, files, (follow(spec) for spec in specs[:MAX_OPEN_SOURCES]))
    refusals = [first_row_error(*follow(spec)) for spec in specs[:MAX_OPEN_SOURCES]]
    packing_length = config.packing_length or max_length
    sharing, not_shared = sharing_of_stream(config, files.config)
    state = RunState.of(
        config,
        plan="stream",
        cache=rows_fingerprint(export, files, specs, with_times=False),
        max_length=max_length,
        packing_length=packing_length,
        world_size=world.data.size,
        streaming=_settings(config, sharing),
        shares_prefixes=sharing is not None,
    )
    options = part_of(
        StreamOptions,
        config,
        packing_length=packing_length,
        shuffle_buffer_size=config.shuffle_buffer_size if config.shuffle else 1,
        num_epochs=int(config.num_train_epochs),
    )
    source = StreamedSource(
        config=config,
        world=world,
        files=files,
        media_limits=encoder.limits,
        specs=specs,
        spec=export.encode_spec,
        options=options,
        sharing=sharing,
    )
    refused = [line for line in refusals if line is not None][:1]
    return source, state, [*([] if not_shared is None else [not_shared]), *encoder.remarks, *refused]


def _settings(config: TrainConfig, sharing: IntervalSharing | None) -> str:
    """The other settings that decide the packs of a stream, in one line, which checkpoints record."""
    pack_names = [field.name for field in dataclasses.fields(PackOptions) if field.name not in _CHANGES_NO_PACK]
    names = ("packing_interval", "shuffle_buffer_size", *pack_names, "num_train_epochs", "loss_reduction")
    names += ("share_prefix", "max_rows_per_tree") if sharing is not None else ()
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)
