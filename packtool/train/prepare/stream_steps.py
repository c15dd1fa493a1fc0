"""The training steps of a stream, as one rank sees them: no plan tells what a step holds, so ranks add it up.

Before a step each rank tells the others, by one sum of a few numbers, what its packs hold and whether more will come.
A rank whose rows have ended trains empty micro-batches, with zero loss, until all have; the loss stays the mean over
the true target tokens of the step.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice

import numpy as np

from packtool.batch.micro_batch import MicroBatch
from packtool.cache.nothing_left import all_dropped
from packtool.launch.world import World
from packtool.plan.cost import CostModel
from packtool.rows.sample import Dropped
from packtool.stream.packs import PackStream, StreamedPack
from packtool.stream.sharing import Added
from packtool.stream.state import StreamState, write_stream_state
from packtool.train.prepare.costs import RunCosts
from packtool.train.prepare.figures import StepFigures
from packtool.train.prepare.prepared import NumberExchange, PreparedRun, RankStep, Steps
from packtool.train.prepare.result import TrainResult

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
            raise all_dropped("no sample is left of the rows", self._stream.dropped, self._log.firsts, where)
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
        dropped, left_out = Counter[str](), Counter[str]()
        for rows, parts in self._exchange.gathered((dict(self._stream.dropped), dict(self._stream.parts_left_out))):
            dropped.update(rows)
            left_out.update(parts)
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
            dropped=dict(sorted(dropped.items())),
            parts_left_out=dict(sorted(left_out.items())),
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
        noted = () if start is None else (start.dropped, start.parts_left_out)
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
