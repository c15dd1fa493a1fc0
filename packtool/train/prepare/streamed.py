"""Everything of a streaming run that is decided before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtool.attention.parallel.axes import Axes
from packtool.config.export import EncodeSpec
from packtool.config.train import TrainConfig
from packtool.encode.blocks import check_template, encode_samples, refused_at_first, samples_of
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.families import MediaLimits, family_of
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World
from packtool.plan.cost import CostModel
from packtool.plan.packing import PackOptions
from packtool.rows.sample import Dropped
from packtool.rows.scan import follow
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of
from packtool.stream.packs import StreamOptions
from packtool.stream.reading import MOST_OPEN
from packtool.stream.state import StreamState, read_state
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.checkpoint import read_state as read_run_state
from packtool.train.prepare.from_rows import length_of_rows, rows_fingerprint
from packtool.train.prepare.place import checkpoint_of, with_resumed_version
from packtool.train.prepare.planner import cost_of
from packtool.train.prepare.sequence_parallel import axes_of
from packtool.train.prepare.whole import check_resumable


@dataclass(frozen=True)
class OpenSchedule:
    """The steps of a run whose samples nobody has counted: numbered through, in no epochs.

    Args:
        num_steps: at most.
    """

    num_steps: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the whole run, because nobody knows where an epoch ends."""
        return self.num_steps

    def locate(self, step: int) -> tuple[int, int]:
        """Epoch and step within it."""
        return 0, step


@dataclass(frozen=True)
class PreparedStream:
    """A streaming run that only has to be trained.

    Args:
        specs: files of all rows.
        spec: how they are encoded.
        options: how they are packed.
        media_limits: that pixels and sounds are loaded with.
        state: what a checkpoint of this run says of it.
        checkpoint: the one to go on from, or None.
        start: first step to train.
        axes: how rows are shared.
        cost: FLOPs of packs.
        stream: where this rank's packs go on; None for the beginning.
    """

    config: TrainConfig
    world: World
    files: ModelFiles
    specs: Sequence[SourceSpec]
    spec: EncodeSpec
    options: StreamOptions
    media_limits: MediaLimits
    schedule: OpenSchedule
    state: RunState
    checkpoint: str | None
    start: int
    axes: Axes
    cost: CostModel
    stream: StreamState | None
    notes: tuple[str, ...] = ()
    weights: str | None = None


def prepare_stream(config: TrainConfig, world: World) -> PreparedStream:
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
    check_template(config.model, encoder, [follow(spec) for spec in specs[:MOST_OPEN]])
    refusals = [refused_at_first(*follow(spec)) for spec in specs[:MOST_OPEN]]
    packing_length = config.packing_length or max_length
    family = family_of(files, config)
    state = RunState(
        plan="stream",
        cache=rows_fingerprint(asked, files, specs, with_times=False),
        seed=config.seed,
        train_type=config.train_type,
        packing=True,
        max_length=max_length,
        packing_length=packing_length,
        world_size=world.data.size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        streaming=_settings(config),
        master_weights=config.master_weights,
    )
    found = checkpoint_of(config)
    checkpoint = None if config.resume_only_model else found.directory
    start = 0
    if checkpoint is not None:
        before = read_run_state(checkpoint)
        state.check_continues(checkpoint, before)
        check_resumable(checkpoint, world.rank, world.size)
        start = before.step
    return PreparedStream(
        config,
        world,
        files,
        specs,
        asked.encode_spec,
        _options(config, packing_length),
        family.limits if family is not None else MediaLimits(),
        OpenSchedule(config.max_steps),
        state,
        checkpoint,
        start,
        axes_of(config, world, files, np.array([max_length]), trained=True),
        cost_of(files.config),
        read_state(checkpoint, world.data.rank) if checkpoint is not None else None,
        (*[line for line in refusals if line is not None][:1], *found.notes()),
        found.directory if config.resume_only_model else None,
    )


def first_samples(run: PreparedStream, most: int = 4) -> list[EncodedSample]:
    """The shortest samples of the first block of the first file, to look at before a run."""
    source, blocks = follow(run.specs[0])
    block = next(iter(blocks), None)
    if block is None:
        return []
    group = list(samples_of(source, [block], may_hold_secrets=False))
    found = [item for item in encode_samples(group, Encoder(run.spec, run.files)) if not isinstance(item, Dropped)]
    return sorted((sample for samples in found for sample in samples), key=lambda sample: sample.length)[:most]


def _options(config: TrainConfig, packing_length: int) -> StreamOptions:
    return StreamOptions(
        pack=PackOptions(
            capacity=packing_length,
            algorithm=config.packing_algorithm,
            batch_size=config.packing_batch_size,
            look_ahead=config.look_ahead,
            max_samples=config.max_samples_per_pack,
            max_media_tokens=config.max_media_tokens_per_pack,
            shuffle=config.shuffle,
        ),
        interval=config.packing_interval,
        shuffle_buffer_size=config.shuffle_buffer_size if config.shuffle else 1,
        num_proc=config.dataset_num_proc,
        num_epochs=int(config.num_train_epochs),
        seed=config.seed,
        strict=config.strict,
    )


def _settings(config: TrainConfig) -> str:
    """What else decides the packs of a stream, in one line."""
    names = (
        "packing_interval",
        "shuffle_buffer_size",
        "shuffle",
        "packing_algorithm",
        "packing_batch_size",
        "look_ahead",
        "max_samples_per_pack",
        "max_media_tokens_per_pack",
        "num_train_epochs",
        "loss_reduction",
    )
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)
