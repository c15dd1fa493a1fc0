"""A run that is ready to train: inputs checked, steps planned as far as possible, resume point found. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool import storage
from packtool.attention.parallel.axes import Axes
from packtool.config.settings import flag
from packtool.config.train import TrainConfig
from packtool.encode.families import family_of
from packtool.errors import MismatchError
from packtool.launch.world import World
from packtool.planning.ledger import Ledger
from packtool.stream.reading import read_stream_state
from packtool.train.prepare.cached import CachedSource, sample_figures
from packtool.train.prepare.caches import refuse_stretched_positions
from packtool.train.prepare.checkpoint import (
    ONLY_MODEL,
    BatchShape,
    RunState,
    check_resumable,
    read_options,
    steps_planned,
)
from packtool.train.prepare.evaluation import Validation, validation_of
from packtool.train.prepare.figures import RankTokens, Steps, length_step, max_tokens, num_fillers
from packtool.train.prepare.history import RunRecord, Segment, recorded_options
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.lock_file import check_locked
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.output_dir import ResumePoint, with_resumed_folder
from packtool.train.prepare.parallelism import axes_of, with_sequence_parallel_size
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.resume import SourceChange, find_position
from packtool.train.prepare.sample_losses import StreamRecord
from packtool.train.prepare.streamed import CountExchange, StreamedSource, StreamedSteps, open_stream
from packtool.train.prepare.timeline import OpenTimeline, Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A training run on one rank, ready for its first step.

    Args:
        state: recorded by its checkpoints; a run that resumes from them must have the same.
        axes_by_size: sequence parallelism of the run and of its stages, by the number of ranks that share a sequence.
        ledger: of the samples trained before; None for a stream.
        changes: of each cache since the checkpoint; empty if the data are the same.
    """

    config: TrainConfig
    world: World
    source: CachedSource | StreamedSource
    state: RunState
    resume_point: ResumePoint
    axes_by_size: Mapping[int, Axes]
    notes: tuple[str, ...] = ()
    validation: Validation | None = None
    ledger: Ledger | None = None
    changes: tuple[SourceChange, ...] = ()

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        world: World,
        resume_point: ResumePoint | None = None,
        preview_inputs: Inputs | None = None,
    ) -> Run:
        """Check that the model, the caches or rows, the options and the checkpoint fit, and plan the first epoch.

        Takes seconds, because no weights are loaded. Every rank calls this, and gets the same plan.

        Args:
            resume_point: of a run on caches; None to find it by the options and the output directory.
            preview_inputs: inputs of ``packtool plan``; plans that are the same are not made again.
        """
        config = with_resumed_folder(config)
        if config.streaming:
            return cls._of_stream(config, world)
        inputs = open_to_train(config, preview_inputs)
        if resume_point is None:
            resume_point = ResumePoint.of(inputs.for_training.config)
        return cls._of_caches(inputs, world, resume_point)

    @classmethod
    def _of_caches(cls, inputs: Inputs, world: World, resume_point: ResumePoint) -> Run:
        """Make a run on caches: find the step at which it starts or resumes, and plan its evaluations.

        ``resume_point`` is a checkpoint, or the beginning of a new run.
        """
        config = inputs.for_training.config  # with defaults that depend on the caches
        batch_shape = BatchShape.of(config, world.data.size)  # numbers of ranks and micro-batches
        if config.locked is not None and world.is_first:
            check_locked(config.locked, inputs, batch_shape)
        new_state = inputs.state(batch_shape)
        position = find_position(resume_point, new_state, world, inputs)
        source = CachedSource(
            inputs=inputs,
            timeline=position.timeline,
            world=world,
            start=resume_point.start,
            figures=sample_figures(inputs, inputs.shared),
        )
        axes_by_size = _axes_by_size(inputs, position.timeline, world)
        axes = axes_by_size[world.sequence_parallel_size]  # how ranks share sequences, if they do
        sharing_messages = () if inputs.no_sharing_reason is None else (inputs.no_sharing_reason,)
        return cls(
            config=config,
            world=world,
            source=source,
            state=position.state,
            resume_point=resume_point,
            axes_by_size=axes_by_size,
            notes=(*sharing_messages, *inputs.notes, *resume_point.notes, *position.messages),
            validation=validation_of(inputs, world, axes),
            ledger=position.ledger,
            changes=position.changes,
        )

    @classmethod
    def _of_stream(cls, config: TrainConfig, world: World) -> Run:
        """Make a run that encodes and packs rows while it trains; reads only the first rows of the first files."""
        source, state, messages = open_stream(config, world)
        resume_point = ResumePoint.of(config)
        checkpoint = resume_point.checkpoint
        saved_state = resume_point.saved_state
        if checkpoint is not None and saved_state is not None:
            state.check_continues(checkpoint, saved_state)
            check_resumable(checkpoint, world.rank, world.size)
            position = read_stream_state(checkpoint, world.data.rank)  # ranks that share sequences read the same rows
            source = dataclasses.replace(source, start=saved_state.step, start_position=position)

        max_length = source.encode_spec.max_length  # samples may be as long: none has been read yet
        if config.removes_padding:
            refuse_stretched_positions(source.files.config, max_length)
        axes = axes_of(config, world, source.files, np.array([max_length]), trained=True)
        return cls(
            config=config,
            world=world,
            source=source,
            state=state,
            resume_point=resume_point,
            axes_by_size={world.sequence_parallel_size: axes},
            notes=(*messages, *resume_point.notes),
        )

    @property
    def timeline(self) -> Timeline | OpenTimeline:
        return self.source.timeline

    @property
    def caches(self) -> CachedSource:
        assert isinstance(self.source, CachedSource), "a run on caches"
        return self.source

    @property
    def start(self) -> int:
        return self.resume_point.start

    @property
    def axes(self) -> Axes:
        """Sequence parallelism of the run; its stages may differ."""
        return self.axes_by_size[self.world.sequence_parallel_size]

    def expected(self) -> TrainResult:
        """The fields of the result that are known before the first step."""
        return TrainResult(
            steps=self.timeline.num_steps,
            num_processes=self.world.size,
            output_dir=self.config.output_dir,
            resumed_from=self.resume_point.checkpoint,
            **self.source.expected(),
        )

    def with_config(self, **changes: Any) -> Run:
        """The same run with changed settings; plan and source must not depend on these."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))

    @property
    def step_configs(self) -> list[tuple[TrainConfig, Axes]]:
        """Settings and sequence parallelism of the steps: one pair, or one for each stage not finished at ``start``."""
        return [
            (
                dataclasses.replace(with_sequence_parallel_size(self.config, size), packing_length=packing_length),
                self.axes_by_size.get(size, Axes()),
            )
            for packing_length, size in self.source.step_shapes
        ]

    def peak_memory_batches(self, number: int = 0) -> tuple[RankTokens, ...]:
        """The micro-batches of one rank that may need most memory, with the settings of ``step_configs[number]``."""
        return self.source.peak_memory_batches(self.step_configs[number][0], number)

    @property
    def length_multiple(self) -> int:
        """Number that lengths of micro-batches are multiples of, in tokens; 1 without ``--torch-compile``."""
        return length_step(self._max_tokens) if self.config.torch_compile else 1

    @property
    def _max_tokens(self) -> int:
        return max(max_tokens(config, config.sequence_parallel_ranks) for config, _ in self.step_configs)

    def length_lines(self) -> Iterator[str]:
        """Describe the lengths of micro-batches that ``--torch-compile`` compiles, if it is set."""
        if self.config.torch_compile:
            step, fillers = self.length_multiple, num_fillers(family_of(self.source.files.config).kinds)
            num_lengths = -(-(self._max_tokens + fillers) // step)
            yield (
                f"torch.compile ({self.config.torch_compile_backend}): micro-batches are padded to multiples of "
                f"{step:,} tokens, up to {num_lengths * step:,}; the first step of each of these {num_lengths} lengths "
                "takes longer, because it is compiled"
            )

    def steps(self, exchange: CountExchange) -> Steps:
        """The steps of this rank from ``start`` on."""
        if isinstance(self.source, StreamedSource):
            return StreamedSteps(self.source, self.config, exchange)
        return self.source

    def record(self) -> RunRecord | StreamRecord:
        """Writer of this run's history."""
        if self.ledger is None:
            return StreamRecord(self.start, self.resume_point.checkpoint)
        reader, state = self.caches.reader, self.state
        caches = zip(reader.directories, reader.manifests, np.diff(reader.offsets).tolist(), strict=True)
        segment = Segment(
            first=self.start,
            num_steps=self.timeline.num_steps,
            config=recorded_options(self.config),
            caches=tuple((storage.absolute(name), manifest.fingerprint, num) for name, manifest, num in caches),
            assignments=state.all_assignments,
            changed_at=None if self.ledger.change is None else self.ledger.change.step,
            plan=state.plan,
            steps=state.steps,
        )
        return RunRecord(self.ledger, self.caches.timeline, segment, self.resume_point.checkpoint)


def _axes_by_size(inputs: Inputs, timeline: Timeline, world: World) -> dict[int, Axes]:
    """Sequence parallelism by the numbers of ranks that share a sequence, in the run and in its stages."""
    config, files, _ = inputs.for_training
    sizes = {world.sequence_parallel_size}
    if inputs.stages:
        sizes |= {stage.inputs.sequence_parallel_size for stage in timeline.stages}
    axes_by_size = {}
    for size in sorted(sizes):
        size_config = with_sequence_parallel_size(config, size)
        axes_by_size[size] = axes_of(size_config, world.shared_by(size), files, inputs.lengths, trained=True)
    return axes_by_size


_OPTIMIZER_OPTIONS = {
    option.name
    for option in dataclasses.fields(TrainConfig)
    if option.metadata["panel"] in ("Optimizer", "Parameters")  # groups of options in the help
    and option.name != "adapters"  # their weights are in the checkpoint
}
"""Options that must stay the same with the optimizer of a checkpoint."""

_LENGTH_OPTIONS = ("num_train_epochs", "max_steps")
_OPTIONS_WITHOUT_EFFECT = ("output_dir", "dataloader_num_workers", "data_change")


def resume_lines(config: TrainConfig, resume_point: ResumePoint, state: RunState, num_steps: int) -> Iterator[str]:
    """Yield a line for a resumed run: checkpoint, steps done and left, changed settings; nothing for a new run."""
    checkpoint, saved_state = resume_point.checkpoint, resume_point.saved_state
    if checkpoint is None or saved_state is None:
        return
    changes = _changed_settings(config, checkpoint)
    ranks_changed = state.needs_reassignment(saved_state)
    _check_changed_settings(config, checkpoint, changes, num_steps, ranks_changed=ranks_changed)
    num_left = max(num_steps - saved_state.step, 0)
    line = f"resuming from {checkpoint}: {saved_state.step:,} of {num_steps:,} steps done, {num_left:,} left"
    settings = ", ".join(f"{flag(name)} {new} (was {old})" for name, (old, new) in changes.items())
    if settings:
        line += f"; changed settings: {settings}"
    yield line


def _check_changed_settings(
    config: TrainConfig, checkpoint: str, changes: Mapping[str, tuple[str, str]], num_steps: int, *, ranks_changed: bool
) -> None:
    """Raise a MismatchError if a run of ``num_steps`` cannot resume with ``changes``, old and new values by option."""
    refused = [name for name in changes if name in _OPTIMIZER_OPTIONS]
    schedule_lines = []
    num_planned = steps_planned(checkpoint)
    if num_steps != num_planned and not _may_change_num_steps(config, changes, ranks_changed=ranks_changed):
        refused += [name for name in _LENGTH_OPTIONS if name in changes]
        line = f"    the learning rate schedule would have {num_steps:,} steps instead of {num_planned:,}"
        schedule_lines.append(line)
    if refused or schedule_lines:
        lines = [f"  - {flag(name)}: {changes[name][0]} in the checkpoint, {changes[name][1]} now" for name in refused]
        raise MismatchError(
            "\n".join([f"{checkpoint} cannot be resumed with other settings:", *lines, *schedule_lines]),
            f"Resume with the settings of that run; or {ONLY_MODEL}",
        )


def _may_change_num_steps(config: TrainConfig, changes: Mapping[str, Any], *, ranks_changed: bool) -> bool:
    """Return whether a resumed run may have another number of steps, which changes its learning rate schedule."""
    if config.lr_scheduler_type == "constant" or config.data_change == "allow":
        return True
    return ranks_changed and not any(name in changes for name in _LENGTH_OPTIONS)


def _changed_settings(config: TrainConfig, checkpoint: str) -> dict[str, tuple[str, str]]:
    """The values of changed options as text, by name: in the checkpoint, and now."""
    saved_options = read_options(checkpoint)
    if saved_options is None:  # an older packtool does not record its options
        return {}
    new_options = recorded_options(config)
    changes = {}
    for setting in dataclasses.fields(config):
        name = setting.name
        if name not in _OPTIONS_WITHOUT_EFFECT and saved_options.get(name) != new_options.get(name):
            changes[name] = (_option_text(setting, saved_options), _option_text(setting, new_options))
    return changes


def _option_text(setting: dataclasses.Field[Any], values: Mapping[str, Any]) -> str:
    """A setting's value, or its default, as on a command line; ``values`` are those of ``recorded_options``."""
    value = values.get(setting.name, setting.default)
    if isinstance(value, list):
        return " ".join(map(str, value))
    if value is None or value is dataclasses.MISSING:
        return "none" if setting.name in values else "default"
    return str(value).lower() if isinstance(value, bool) else str(value)
