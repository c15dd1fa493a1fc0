"""A run that is ready to train: inputs checked, steps planned as far as possible, resume point found. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from packtool import storage
from packtool.attention.parallel.axes import Axes
from packtool.config.train import TrainConfig
from packtool.encode.families import family_of
from packtool.launch.world import World
from packtool.planning.ledger import Ledger
from packtool.stream.reading import read_stream_state
from packtool.train.prepare.cached import CachedSource, sample_figures
from packtool.train.prepare.checkpoint import BatchShape, RunState, check_resumable
from packtool.train.prepare.evaluation import Validation, validation_of
from packtool.train.prepare.figures import RankTokens, Steps, length_step, max_tokens, num_fillers
from packtool.train.prepare.history import RunRecord, Segment, recorded_options
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.output_dir import ResumePoint, with_resumed_version
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.resume import SourceChange, resume
from packtool.train.prepare.sequence_parallel import axes_of, with_shares
from packtool.train.prepare.streamed import NumberExchange, StreamedSource, StreamedSteps, open_stream
from packtool.train.prepare.timeline import OpenTimeline, Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A training run on one rank, ready for its first step.

    Args:
        config: the settings, with all automatic choices made.
        source: samples and steps, of caches or of rows that are encoded during training.
        state: recorded by its checkpoints; a run that resumes from them must have the same.
        axes_by_size: sequence parallelism by number of ranks, of the run and of its stages.
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
        cls, config: TrainConfig, world: World, resume_point: ResumePoint | None = None, planned: Inputs | None = None
    ) -> Run:
        """Check that model, caches or rows, options and checkpoint fit, and plan the first epoch; takes seconds.

        By default, ``resume_point`` is that of the options and output directory. Plans of ``planned`` are reused.
        """
        config = with_resumed_version(config)
        if config.streaming:
            return cls._of_rows(config, world)
        inputs = open_to_train(config, planned)
        config, files, _ = inputs.for_training  # the settings with defaults that depend on the caches
        resume_point = resume_point or ResumePoint.of(config)
        batch_shape = BatchShape.of(config, world.data.size)
        resumed = resume(resume_point, inputs.state(batch_shape), world, inputs)
        # Numbers of ranks that share a sequence, in the run and in its stages.
        sharing_sizes = {world.sequence_parallel_size}
        if inputs.stages:
            sharing_sizes |= {stage.inputs.sequence_parallel_size for stage in resumed.timeline.stages}
        axes_by_size = {
            size: axes_of(with_shares(config, size), world.shared_by(size), files, inputs.lengths, trained=True)
            for size in sorted(sharing_sizes)
        }
        sharing_notes = () if inputs.no_sharing_reason is None else (inputs.no_sharing_reason,)
        return cls(
            config=config,
            world=world,
            source=CachedSource(
                inputs=inputs,
                timeline=resumed.timeline,
                world=world,
                start=resume_point.start,
                figures=sample_figures(inputs),
            ),
            state=resumed.state,
            resume_point=resume_point,
            axes_by_size=axes_by_size,
            notes=(*sharing_notes, *inputs.notes, *resume_point.notes, *resumed.notes),
            validation=validation_of(inputs, world, axes_by_size[world.sequence_parallel_size]),
            ledger=resumed.ledger,
            changes=resumed.changes,
        )

    @classmethod
    def _of_rows(cls, config: TrainConfig, world: World) -> Run:
        """Make a run that encodes and packs rows while it trains; reads the first rows of the first files."""
        source, state, notes = open_stream(config, world)
        resume_point = ResumePoint.of(config)
        checkpoint = resume_point.checkpoint
        if checkpoint is not None and resume_point.before is not None:
            state.check_continues(checkpoint, saved=resume_point.before)
            check_resumable(checkpoint, world.rank, world.size)
            position = read_stream_state(checkpoint, world.data.rank)
            source = dataclasses.replace(source, start=resume_point.start, stream=position)
        lengths = np.array([source.spec.max_length])  # those of the samples are not known yet
        axes = axes_of(config, world, source.files, lengths, trained=True)
        return cls(
            config=config,
            world=world,
            source=source,
            state=state,
            resume_point=resume_point,
            axes_by_size={world.sequence_parallel_size: axes},
            notes=(*notes, *resume_point.notes),
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
                dataclasses.replace(with_shares(self.config, size), packing_length=packing_length),
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

    def steps(self, exchange: NumberExchange) -> Steps:
        """The steps of this rank from ``start`` on."""
        if isinstance(self.source, StreamedSource):
            return StreamedSteps(self.source, self.config, exchange)
        return self.source

    def record(self) -> RunRecord | None:
        """Writer of this run's history and ledger; None for a stream, which has neither."""
        if self.ledger is None:
            return None
        reader, state = self.caches.reader, self.state
        caches = zip(reader.directories, reader.manifests, np.diff(reader.offsets).tolist(), strict=True)
        segment = Segment(
            first=self.start,
            num_steps=self.timeline.num_steps,
            config=recorded_options(self.config),
            caches=tuple((storage.absolute(name), manifest.fingerprint, num) for name, manifest, num in caches),
            assignments=state.assignments or ((0, *state.batch_shape),),
            changed_at=None if self.ledger.change is None else self.ledger.change.step,
            plan=state.plan,
            steps=state.steps,
        )
        return RunRecord(self.ledger, self.caches.timeline, segment, self.resume_point.checkpoint)
