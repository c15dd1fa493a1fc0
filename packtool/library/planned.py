"""Plans: all steps of an epoch, computed without a GPU."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack, overload

from packtool import storage
from packtool.config.plan import PlanConfig
from packtool.errors import ConfigError
from packtool.library.commands import settings_of
from packtool.planning.epoch import EpochPlan
from packtool.report.drawing import wrap_in_frame
from packtool.report.plan import plan_lines
from packtool.report.plan_page import page, page_content
from packtool.report.tables import aligned
from packtool.simulate.run import names_of
from packtool.train.prepare.preview import Preview, preview
from packtool.train.prepare.result import option_words

if TYPE_CHECKING:
    from packtool.library.cache import Cache
    from packtool.library.options import PlanKeywords

COMMAND_ONLY = {
    "save": "use Plan.save(path)",
    "html": "use Plan.page(path)",
    "lock": "use the command packtool plan --lock",
    "sweep": "use the command packtool plan --sweep",
    "media": "use the command packtool plan --media",
    "fit": "use the command packtool plan --fit",
    "resume": "use the command packtool plan --resume",
}
"""Options of ``packtool plan`` that ``packtool.plan`` does not have, with the alternative."""


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step of a plan.

    Args:
        number: 0-based, in the epoch.
        target_tokens: number of labels that carry loss, over all ranks and micro-batches.
        micro_batches: samples by rank, micro-batch and pack, as indexes into ``Cache``, or into all caches in order.
    """

    number: int
    target_tokens: int
    micro_batches: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]


class PlannedSteps(Sequence[PlannedStep]):
    """Optimizer steps of an epoch, each built on access."""

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return self._plan.steps.num_steps

    @overload
    def __getitem__(self, number: int) -> PlannedStep: ...

    @overload
    def __getitem__(self, number: slice) -> list[PlannedStep]: ...

    def __getitem__(self, number: int | slice) -> PlannedStep | list[PlannedStep]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        step = number + len(self) if number < 0 else number
        steps = self._plan.steps
        packs = tuple(
            tuple(
                tuple(tuple(pack.tolist()) for pack in self._plan.samples(step, rank, micro_batch))
                for micro_batch in range(steps.num_micro_batches(step))
            )
            for rank in range(steps.world_size)
        )
        return PlannedStep(step, steps.target_tokens(step), packs)


class Plan:
    """Packs of an epoch, and their assignment to steps and ranks; made by ``packtool.plan``.

    A notebook shows it as its page.

    Attributes:
        config: the options that it was made with.
    """

    def __init__(self, config: PlanConfig) -> None:
        self.config = config
        # Internal: not part of the stable interface.
        self.preview: Preview = preview(config)

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of ``packtool plan --json`` without memory: packs, fill, steps, balance, FLOPs, fingerprints."""
        return self._figures.copy()

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Lines of ``packtool plan``, as (name, figure)."""
        return plan_lines(self._figures)

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return self.preview.figures(self.config.tflops, self.config.mfu)

    @property
    def steps(self) -> Sequence[PlannedStep]:
        """The optimizer steps of the first epoch, each with the samples of every rank, micro-batch and pack."""
        return PlannedSteps(self.preview.timeline.first_plan)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks: processes, or groups of processes that share packs."""
        return self.preview.options.world_size

    @property
    def fingerprint(self) -> str:
        """Hash of packs and steps: plans with equal fingerprints train the same."""
        return self.preview.plan.fingerprint

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write packs and steps as an Arrow file, for ``packtool train --plan``, ``inspect --plan`` and other readers.

        Raises:
            ConfigError: for a plan of a file of lengths, because saved plans refer to caches.
            StorageError: if it cannot be written.
        """
        if self.preview.inputs.reader is None:
            raise ConfigError("a plan of --lengths cannot be saved, because it belongs to no cache", "Plan for caches.")
        self.preview.save(os.fspath(path))

    def page(self, path: str | os.PathLike[str], command: str | None = None) -> None:
        """Write a page that shows the plan: one HTML file that loads no other files.

        Args:
            command: shown on the page as its origin; by default the command line of these options.

        Raises:
            StorageError: if it cannot be written.
        """
        storage.publish(os.fspath(path), self._page(command).encode())

    def _page(self, command: str | None = None) -> str:
        command = command or shlex.join(["packtool", "plan", *option_words(self.config)])
        return page(page_content(self.preview, self._figures, command, self._title))

    @property
    def _title(self) -> str:
        return names_of(self.config.cached_dataset or (str(self.config.mix or self.config.lengths),))

    def __str__(self) -> str:
        return "\n".join(aligned(self.lines))

    def __repr__(self) -> str:
        packs, steps = self._figures["num_packs"], self._figures["steps_per_epoch"]
        return f"Plan of {self._title}: {packs:,} packs in {steps:,} steps of {self.world_size} ranks"

    def _repr_html_(self) -> str:
        return wrap_in_frame(self._page(), self._title)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options, from which another process makes the same plan."""
        return Plan, (self.config,)


def plan(
    caches: str | os.PathLike[str] | Cache | Sequence[str | os.PathLike[str] | Cache] = (),
    **options: Unpack[PlanKeywords],
) -> Plan:
    """Plan an epoch, as the command ``packtool plan``.

        plan = packtool.plan("cache", packing_length=4096, world_size=8, gradient_accumulation_steps=2)
        print(plan)
        print(plan.summary["fill"], plan.steps[0].micro_batches)
        plan.page("plan.html")

    Args:
        caches: one or several, each a directory or a ``Cache``.
        options: those of ``packtool plan``; ``lengths`` plans for a file of lengths instead of caches.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: as the command.
    """
    set_options: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    problems = [f"{name} is not supported here: {text}" for name, text in COMMAND_ONLY.items() if name in set_options]
    if problems:
        raise ConfigError.from_problems(problems)
    return Plan(settings_of(PlanConfig, {**set_options, "cached_dataset": caches}))
