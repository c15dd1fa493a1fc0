"""The steps of one rank on rows that are encoded and packed during training.

There is no plan, so ranks add up what a step holds: before each step one all-reduce of a few numbers sums their packs'
figures, and tells whether any rank has more rows. A rank without rows trains empty micro-batches, with zero loss, until
all have ended; the loss stays the mean over the target tokens of the step.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np

from packtool.batch.micro_batch import MicroBatch
from packtool.config.train import TrainConfig
from packtool.launch.world import World
from packtool.planning.cost import CostModel
from packtool.rows.sample import Dropped, all_dropped
from packtool.stream.packs import Added, PackStream, StreamedPack
from packtool.stream.reading import StreamState, write_stream_state
from packtool.train.prepare.costs import RunCosts
from packtool.train.prepare.figures import RankStep, StepFigures, Steps
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.streamed import StreamedSource

_TOWER_SUMS = ("vision_tokens", "patch_squares", "audio_tokens")
_SUMS = (
    *("target_tokens", "logits", "whole_tokens", "tokens", "packs", "samples"),
    *("attended", "in_windows", "attended_dense", *_TOWER_SUMS),
    "more",
)


class NumberExchange(Protocol):
    """An exchange of numbers between ranks during training; every rank calls each method at the same step."""

    def sums(self, counts: Sequence[int]) -> list[int]:
        """Each number added up over the data-parallel ranks."""

    def gathered(self, value: Any) -> list[Any]:
        """The values of all data-parallel ranks, by rank."""


class StreamedSteps(Steps):
    """The steps of one rank of a stream.

    Args:
        source: of the rows.
        config: of the run.
        exchange: with the other ranks.
    """

    def __init__(self, source: StreamedSource, config: TrainConfig, exchange: NumberExchange) -> None:
        self.totals: Counter[str] = Counter()
        self._source, self._exchange = source, exchange
        self._capacity, self._batch_size = source.options.packing_length, config.per_device_train_batch_size
        self._packs_per_step = self._batch_size * config.gradient_accumulation_steps
        self._costs = RunCosts.of(source.config, source.files.config)
        self._log = DropLog(config.output_dir, source.world, source.stream)
        data = source.world.data
        self._stream = PackStream(
            source.specs,
            source.spec,
            source.options,
            rank=data.rank,
            world_size=data.size,
            start=source.stream,
            sharing=source.sharing,
            log=self._log,
        )
        self._step = source.start
        self._after = {source.start: source.stream or StreamState()}

    def drawn(self) -> Iterator[RankStep]:
        """Yield steps without end, for other ranks may have more rows."""
        self._log.begin()
        packs = iter(self._stream)
        ahead = next(packs, None)
        after = self._after[self._source.start]
        while True:
            taken: list[StreamedPack] = []
            while ahead is not None and len(taken) < self._packs_per_step:
                taken.append(ahead)
                after = ahead.state
                ahead = next(packs, None)
            micro = [
                taken[start : start + self._batch_size] for start in range(0, self._packs_per_step, self._batch_size)
            ]
            yield RankStep(
                tuple(MicroBatch([pack.samples for pack in packs]) for packs in micro),
                partial(self._begun, self._counts(taken, is_last=ahead is None), after),
            )

    def _counts(self, packs: list[StreamedPack], *, is_last: bool) -> list[int]:
        """The figures of one rank's packs of a step, in the order of ``_SUMS``."""
        lengths = np.array([sample.length for pack in packs for sample in pack.samples], np.int64)
        added = Added.joined([pack.added for pack in packs])
        num_tokens = lengths.sum() - added.shared.sum()
        counts = [
            *(sum(pack.num_targets for pack in packs), added.targets.sum(), lengths.sum(), num_tokens),
            *(len(packs), len(lengths)),
            np.square(lengths).sum() - np.square(added.shared).sum(),
            self._costs.model.window_squares(lengths, added.shared).sum(),
            sum(pack.num_tokens**2 for pack in packs),
            *((added.media_tokens - added.audio_tokens).sum(), added.patch_squares.sum(), added.audio_tokens.sum()),
            not is_last,
        ]
        return [int(count) for count in counts]

    def _begun(self, counts: list[int], after: StreamState) -> StepFigures:
        """Begin a step: add up its ``counts`` over all ranks; ``after`` is the stream's position behind its packs."""
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
            units=sums["samples" if self._source.config.loss_reduction == "sample" else "target_tokens"],
            tokens=sums["tokens"],
            computed_tokens=sums["packs"] * self._capacity,
            attended=sums["attended"],
            attended_dense=sums["attended_dense"],
            flops=_flops(self._costs.model, sums),
            hardware_flops=_flops(self._costs.hardware, sums),
        )

    def save(self, checkpoint: str, step: int) -> None:
        """Write this rank's position in the stream after ``step``, which is the step begun last or the one before."""
        world = self._source.world
        os.makedirs(checkpoint, exist_ok=True)
        if world.share_rank == 0:
            write_stream_state(checkpoint, world.data.rank, self._after[step])

    def counted(self, result: TrainResult) -> TrainResult:
        """Add the counts of the rows that all ranks have read."""
        counts = self._stream.counts.total(self._exchange.gathered(self._stream.counts))
        totals = self.totals
        return dataclasses.replace(
            result,
            num_samples=totals["samples"],
            num_packs=totals["packs"],
            samples_per_pack=totals["samples"] / max(totals["packs"], 1),
            fill=totals["tokens"] / max(totals["packs"] * self._capacity, 1),
            target_tokens=totals["target_tokens"],
            num_shared_tokens=totals["whole_tokens"] - totals["tokens"],
            steps_without_packing=-(-totals["samples"] // (self._source.world.data.size * self._packs_per_step)),
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
        start: where its stream resumes: lines of earlier rows stay, later ones are removed.

    Attributes:
        firsts: of each reason, the first row that this run met.
    """

    def __init__(self, output_dir: str, world: World, start: StreamState | None) -> None:
        self.path = os.path.join(output_dir, f"dropped-{world.data.rank:05d}.jsonl")
        self.firsts: dict[str, str] = {}
        self._writes = world.share_rank == 0
        logged = () if start is None else (start.counts.dropped, start.counts.parts_left_out)
        self._kept = sum(sum(counts.values()) for counts in logged)

    def __call__(self, item: Dropped) -> None:
        """Append a line."""
        self.firsts.setdefault(item.reason, item.summary)
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
