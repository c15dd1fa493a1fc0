"""What a run is once it is prepared: one interface, whether its samples come from caches or from a stream. No torch."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from packtool.attention.parallel.axes import Axes
from packtool.batch.micro_batch import MicroBatch
from packtool.cache.reader import CacheReader
from packtool.cache.views import SampleReader
from packtool.config.train import TrainConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.launch.world import World
from packtool.planning.dynamic import EvaluationPlan
from packtool.train.prepare.checkpoint import RunState, check_resumable, read_run_state
from packtool.train.prepare.figures import RankTokens, StepFigures
from packtool.train.prepare.place import checkpoint_of
from packtool.train.prepare.record import RunRecord
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.sequence_parallel import with_shares
from packtool.train.prepare.timeline import OpenTimeline, Timeline


@dataclass(frozen=True, eq=False)
class Validation:
    """The val split of a run's caches.

    Args:
        samples: with their labels as ``--loss-scale`` chooses them.
        plan: micro-batches of all ranks.
    """

    reader: CacheReader
    samples: SampleReader
    plan: EvaluationPlan


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins, or goes on.

    Args:
        checkpoint: the one to go on from, or None.
        before: its state.
        weights: checkpoint to take weights from, and nothing else; None for those of the model.
        notes: what is to be said of checkpoints that were passed over.
    """

    checkpoint: str | None
    before: RunState | None
    weights: str | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, config: TrainConfig) -> ResumePoint:
        """What the options and the output directory say.

        Raises:
            ConfigError, MismatchError: as ``checkpoint_of``.
        """
        found = checkpoint_of(config)
        if config.resume_only_model:
            return cls(None, None, found.directory, tuple(found.notes()))
        before = read_run_state(found.directory) if found.directory is not None else None
        return cls(found.directory, before, None, tuple(found.notes()))

    @property
    def start(self) -> int:
        """The first step to train."""
        return self.before.step if self.before is not None else 0

    def check(
        self,
        state: RunState,
        world: World,
        *,
        data_may_change: bool = False,
        other_data: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """Raise unless the run with this state may go on from the checkpoint; arguments as ``RunState`` has them.

        Raises:
            MismatchError: naming every difference, or what the checkpoint lacks.
        """
        if self.checkpoint is not None and self.before is not None:
            state.check_continues(self.checkpoint, self.before, data_may_change=data_may_change, other_data=other_data)
            check_resumable(self.checkpoint, world.rank, world.size)


class NumberExchange(Protocol):
    """How ranks tell each other numbers while they train; every rank calls each method at the same step."""

    def sums(self, counts: Sequence[int]) -> list[int]:
        """Each number added up over the data-parallel ranks."""

    def gathered(self, value: Any) -> list[Any]:
        """What each data-parallel rank has, by rank."""


@dataclass(frozen=True, eq=False)
class RankStep:
    """One optimizer step of one rank, before anything of it is read.

    Args:
        micro_batches: of this rank, the same number on every rank.
        begin: gives the figures over all ranks; called once on every rank, when the step is next.
    """

    micro_batches: tuple[MicroBatch, ...]
    begin: Callable[[], StepFigures]


class Steps(ABC):
    """The steps of one rank from the first that is to be trained.

    Attributes:
        ended: whether the step that was begun last is the last there is, however many were expected.
    """

    ended = False

    @abstractmethod
    def drawn(self) -> Iterator[RankStep]:
        """The steps in order; they are drawn ahead of those that are trained."""

    def save(self, checkpoint: str, step: int) -> None:  # noqa: B027  # nothing is what most do
        """Keep in a checkpoint what this rank needs to go on after so many steps; most need nothing."""

    def counted(self, result: TrainResult) -> TrainResult:
        """The result with what was only found out on the way; every rank calls this at the end."""
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedRun(ABC):
    """A run that only has to be trained.

    Args:
        config: its settings.
        world: this process among the others.
        files: of the model.
        media_limits: that pixels and sounds are loaded with.
        timeline: its steps by number.
        state: what a checkpoint of this run says of it, and what a run that goes on must agree with.
        resume_point: where it begins.
        axes: how sequences are shared.
        ways: how those are that fewer ranks share, by their number: of stages that say so.
        notes: remarks for the user.
        validation: what is evaluated between steps, None for nothing.
        least_shared: tokens that a prefix of samples of a pack must have to be computed once; None has all samples
            computed whole.
    """

    config: TrainConfig
    world: World
    files: ModelFiles
    media_limits: MediaLimits
    timeline: Timeline | OpenTimeline
    state: RunState
    resume_point: ResumePoint
    axes: Axes
    ways: Mapping[int, Axes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    validation: Validation | None = None
    least_shared: int | None = None

    @property
    def start(self) -> int:
        """The first step to train."""
        return self.resume_point.start

    @property
    def tells_channels(self) -> bool:
        """Whether losses are logged by channel, too."""
        return self.config.enable_channel_loss

    @abstractmethod
    def expected(self) -> TrainResult:
        """What is known of the run's result before the first step."""

    @abstractmethod
    def lines(self, expected: TrainResult) -> Iterator[str]:
        """What is to be said before the first step."""

    @abstractmethod
    def media_tokens(self) -> float:
        """Media tokens of one rank's micro-batch, about as many as there will be."""

    @property
    def kinds_of_steps(self) -> Sequence[tuple[TrainConfig, Axes]]:
        """The settings that a step may have, and how its sequences are shared: one, or one for each stage."""
        return ((with_shares(self.sized, self.world.sequence_parallel_size), self.axes),)

    @abstractmethod
    def heaviest(self, kind: int = 0) -> tuple[RankTokens, ...]:
        """The micro-batches of one rank that may need most memory.

        Args:
            kind: number among ``kinds_of_steps``.
        """

    @abstractmethod
    def first_samples(self, most: int) -> list[EncodedSample]:
        """Some of the first samples of this rank, short ones, to try the model on."""

    @property
    @abstractmethod
    def read(self) -> Callable[[Any], EncodedSample]:
        """What turns that which a ``MicroBatch`` has of a sample into the sample; can be sent to worker processes."""

    @abstractmethod
    def names(self, micro_batch: MicroBatch) -> list[str]:
        """Where the samples of a micro-batch came from, in words."""

    @abstractmethod
    def words(self, micro_batch: MicroBatch) -> str:
        """What a micro-batch holds, in one line for ``--debug``."""

    @abstractmethod
    def steps(self, exchange: NumberExchange) -> Steps:
        """The steps of this rank from ``start`` on."""

    def stage_line(self, step: int) -> str | None:
        """What is to be said after so many steps, before the next one: that a stage begins."""
        return None

    def record(self) -> RunRecord | None:
        """What keeps a ledger of this run; None where nobody knows which samples there are."""
        return None

    @property
    def sized(self) -> TrainConfig:
        """The settings with the packing length that was decided."""
        return dataclasses.replace(self.config, packing_length=self.state.packing_length)

    def with_config(self, **changes: Any) -> PreparedRun:
        """The same run with other settings that its plan does not depend on."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **changes))
