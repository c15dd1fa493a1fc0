"""The training steps of a stream, as one rank sees them: no plan tells what a step holds, so ranks add it up.

Before a step each rank tells the others, by one sum of a few numbers over gloo, what its packs hold and whether more
will come. A rank whose rows have ended trains empty micro-batches, with zero loss, until all have; the loss stays the
mean over the true target tokens of the step.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from packtool.batch.batch import Batch
from packtool.batch.dataset import GivenMicroBatches, load_micro_batches
from packtool.batch.spec import InputSpec
from packtool.cache.nothing_left import all_dropped
from packtool.encode.encoded import EncodedSample
from packtool.rows.sample import Dropped
from packtool.stream.packs import PackStream, StreamedPack
from packtool.stream.state import StreamState
from packtool.train.loop.batch_log import is_watched, rows_in_words, watched
from packtool.train.loop.loader import TrainingStep, cut_of
from packtool.train.loop.result import TrainResult
from packtool.train.prepare.figures import StepFigures
from packtool.train.prepare.streamed import PreparedStream

_SUMS = ("target_tokens", "tokens", "packs", "samples", "attended", "attended_dense", "media_tokens", "more")

_Origins = list[tuple[str, int]]


@dataclass(frozen=True)
class _OwnStep:
    """What this rank's packs of a step hold.

    Args:
        counts: as in ``_SUMS``.
        after: where the stream stands behind them.
        origins: of the samples of each micro-batch.
    """

    counts: tuple[int, ...]
    after: StreamState
    origins: list[_Origins]


class StreamLoader:
    """What transformers' Trainer takes for its dataloader; see ``StepLoader``.

    Args:
        run: of this rank.
        spec: the model that micro-batches are collated for.
    """

    def __init__(self, run: PreparedStream, spec: InputSpec) -> None:
        self.run = run
        self.spec = spec
        self.totals: Counter[str] = Counter()
        self.is_last = False  # the step that was given last
        self._own = deque[_OwnStep]()
        self._origins: list[_Origins] = []  # of the samples of each micro-batch of the step that was given last
        self._after: dict[int, StreamState] = {}
        self._log = DropLog(run)
        self._stream = PackStream(
            run.specs,
            run.spec,
            run.options,
            rank=run.world.data.rank,
            world_size=run.world.data.size,
            start=run.stream,
            log=self._log,
        )
        self._group: Any = None

    def __len__(self) -> int:
        return self.run.schedule.num_steps

    def __iter__(self) -> Iterator[TrainingStep]:
        config = self.run.config
        self._log.begin()
        self._group = _gloo_group(self.run.world.size)
        batches = load_micro_batches(
            GivenMicroBatches(self.spec, skip_bad_media=config.on_bad_media == "skip", cut=cut_of(self.run)),
            self._micro_batches(),
            num_workers=config.dataloader_num_workers or 0,
            pin_memory=torch.cuda.is_available(),
        )
        for step in range(self.run.start, self.run.schedule.num_steps):
            # The first micro-batch of a step is not made before the packs of the whole step are known.
            first = next(batches)
            own = self._own.popleft()
            sums = dict(zip(_SUMS, self._summed(own.counts), strict=True))
            if not sums["packs"]:
                where = f"Rows that were dropped are listed in {self._log.path}."
                raise all_dropped("no sample is left of the rows", self._stream.dropped, self._log.firsts, where)
            more = sums.pop("more")
            self.totals.update(sums)
            self._after = {step: self._after.get(step, own.after), step + 1: own.after}
            self.is_last = not more
            num = config.gradient_accumulation_steps
            self._origins = own.origins
            micro_batches: Iterator[Batch] = chain([first], islice(batches, num - 1))
            if is_watched():
                held = (rows_in_words(origins) for origins in self._origins)
                micro_batches = watched(micro_batches, held, rank=self.run.world.data.rank, step=step, num=num)
            yield TrainingStep(self._figures(sums), num, micro_batches)
            if not more:
                return

    def _figures(self, sums: Mapping[str, int]) -> StepFigures:
        names = ("tokens", "attended", "media_tokens", "target_tokens")
        cost = self.run.cost(*(np.array(sums[name]) for name in names))
        return StepFigures(
            target_tokens=sums["target_tokens"],
            units=sums["samples" if self.run.config.loss_reduction == "sample" else "target_tokens"],
            tokens=sums["tokens"],
            computed_tokens=sums["packs"] * self.run.options.pack.capacity,
            attended=sums["attended"],
            attended_dense=sums["attended_dense"],
            flops=float(cost),
        )

    def names(self, step: int, number: int) -> list[str]:
        """See ``StepLoader``; of the step that was given last."""
        return [f"row {row} of {source}" for source, row in self._origins[number]]

    def state_after(self, step: int) -> StreamState:
        """Where this rank's stream stands after so many steps: the last one that was given, or the one before."""
        return self._after[step]

    def counted(self, result: TrainResult) -> TrainResult:
        """The result with what was read, over all ranks."""
        dropped: Counter[str] = Counter()
        for counts in self._gathered(dict(self._stream.dropped)):
            dropped.update(counts)
        totals, options = self.totals, self.run.options
        each = self.run.world.data.size * self.run.config.gradient_accumulation_steps
        each *= self.run.config.per_device_train_batch_size
        return dataclasses.replace(
            result,
            num_samples=totals["samples"],
            num_packs=totals["packs"],
            samples_per_pack=totals["samples"] / max(totals["packs"], 1),
            fill=totals["tokens"] / max(totals["packs"] * options.pack.capacity, 1),
            target_tokens=totals["target_tokens"],
            steps_without_packing=-(-totals["samples"] // each),
            dropped=dict(sorted(dropped.items())),
        )

    def _micro_batches(self) -> Iterator[list[EncodedSample]]:
        """Samples of each micro-batch; of a whole step at a time, and without end."""
        config = self.run.config
        each = config.per_device_train_batch_size
        packs = iter(self._stream)
        ahead = next(packs, None)
        after = self.run.stream or StreamState()
        while True:
            taken: list[StreamedPack] = []
            while ahead is not None and len(taken) < each * config.gradient_accumulation_steps:
                taken.append(ahead)
                after = ahead.state
                ahead = next(packs, None)
            counts = (
                sum(pack.num_targets for pack in taken),
                sum(pack.num_tokens for pack in taken),
                len(taken),
                sum(len(pack.samples) for pack in taken),
                sum(sample.length**2 for pack in taken for sample in pack.samples),
                sum(pack.num_tokens**2 for pack in taken),
                sum(sample.num_media_tokens for pack in taken for sample in pack.samples),
                int(ahead is not None),
            )
            micro = [taken[start : start + each] for start in range(0, each * config.gradient_accumulation_steps, each)]
            of_micro = [[sample for pack in packs for sample in pack.samples] for packs in micro]
            origins = [[(sample.source, sample.row) for sample in samples] for samples in of_micro]
            self._own.append(_OwnStep(counts, after, origins))
            yield from of_micro

    def _summed(self, counts: tuple[int, ...]) -> list[int]:
        """Over all ranks."""
        if self.run.world.size == 1:
            return list(counts)
        sums = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(sums, group=self._group)
        # Those that share rows have read the same.
        sums //= self.run.world.num_sharing
        return [int(number) for number in sums.tolist()]

    def _gathered(self, value: dict[str, int]) -> list[dict[str, int]]:
        if self.run.world.size == 1:
            return [value]
        found: list[Any] = [None] * self.run.world.size
        dist.all_gather_object(found, value, group=self._group)
        return found[:: self.run.world.num_sharing]


class DropLog:
    """``OUTPUT_DIR/dropped-00000.jsonl``: a line for each row that a rank could not use.

    Args:
        run: of this rank; the lines of an earlier run that it goes on from stay, those behind its checkpoint go.

    Attributes:
        firsts: of each reason, the first row that this run met.
    """

    def __init__(self, run: PreparedStream) -> None:
        self.path = os.path.join(run.config.output_dir, f"dropped-{run.world.data.rank:05d}.jsonl")
        self.firsts: dict[str, str] = {}
        self._writes = run.world.share_rank == 0
        self._kept = sum(run.stream.dropped.values()) if run.stream is not None else 0

    def __call__(self, item: Dropped) -> None:
        """Append a line."""
        self.firsts.setdefault(item.reason, item.shown)
        if not self._writes:
            return
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(item), ensure_ascii=False) + "\n")

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


def _gloo_group(world_size: int) -> Any:
    """A group for numbers on the host; None is the default one."""
    if world_size == 1 or dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo")
