"""The micro-batches of one rank in one epoch, in the order of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from packtool.batch.batch import Batch, SkippedSample
from packtool.batch.collate import collate_packs, collate_padded, load_media
from packtool.batch.collate_shard import collate_shard
from packtool.batch.shard import Cut
from packtool.batch.spec import InputSpec, Tower
from packtool.batch.worker import RESUME, deaths_told
from packtool.cache.chosen import SampleReader
from packtool.cache.shard import num_targets
from packtool.encode.encoded import EncodedSample
from packtool.errors import MediaError, PacktoolError
from packtool.launch.worker import begin_worker
from packtool.plan.epoch import EpochPlan


@dataclass(frozen=True, eq=False)
class TowerUse:
    """What decides which towers run in a micro-batch, alike on all ranks.

    Args:
        always: towers that run in every one: those that are trained, for ranks wait for their gradients.
        brings: for each other tower, whether a sample has something for it, bool (N,) by position in the cache.
    """

    always: frozenset[Tower]
    brings: Mapping[Tower, npt.NDArray[np.bool_]]

    def in_micro_batches(self, plan: EpochPlan) -> dict[Tower, npt.NDArray[np.bool_]]:
        """Whether each tower runs in each micro-batch of an epoch, (M,): where some rank has need of it."""
        packs, num = plan.packs, int(plan.steps.step_offsets[-1]) // plan.steps.world_size
        found: dict[Tower, npt.NDArray[np.bool_]] = {tower: np.ones(num, np.bool_) for tower in self.always}
        for tower in self.brings.keys() - self.always:
            in_packs = packs.sums_per_pack(self.brings[tower][packs.samples].astype(np.int64)) > 0
            found[tower] = plan.steps.on_any_rank(in_packs)
        return found


class PlannedMicroBatches(Dataset["Batch | PacktoolError"]):
    """Item i is micro-batch i of a rank; nothing is drawn, everything follows from the plan.

    Args:
        reader: of the samples that the plan numbers.
        plan: of one epoch.
        rank: data-parallel rank.
        spec: the model they are collated for.
        packing: False pads one sample a row instead.
        skip_bad_media: leave samples out whose media cannot be loaded.
        cut: of rows that several ranks share, and this rank's part.
        use: of the model's towers; without it all of them run in every micro-batch.
    """

    def __init__(
        self,
        reader: SampleReader,
        plan: EpochPlan,
        *,
        rank: int,
        spec: InputSpec,
        packing: bool = True,
        skip_bad_media: bool = False,
        cut: Cut | None = None,
        use: TowerUse | None = None,
    ) -> None:
        self.reader = reader
        self.plan = plan
        self.rank = rank
        self.spec = spec
        self.packing = packing
        self.cut = cut
        self.skip_bad_media = skip_bad_media
        # The same number on every rank, so cells divide evenly: step s begins at micro-batch first[s] of this rank.
        self.first = plan.steps.step_offsets // plan.steps.world_size
        self._running = use.in_micro_batches(plan) if use is not None else None

    def __len__(self) -> int:
        return int(self.first[-1])

    def __getitem__(self, index: int) -> Batch | PacktoolError:
        """The micro-batch, or the error that it met: raised in a worker, it would lose its type and its remedy."""
        if not 0 <= index < len(self):
            raise IndexError(f"micro-batch {index} of {len(self)}")
        step = int(np.searchsorted(self.first, index, side="right")) - 1
        micro_batch = index - int(self.first[step])
        packs = self.plan.samples(step, self.rank, micro_batch)
        towers = self.spec.towers
        if self._running is not None:
            towers = frozenset(tower for tower, runs in self._running.items() if runs[index])
        try:
            samples = [self.reader.sample(int(position)) for pack in packs for position in pack]
            if self.cut is not None:
                places = self.plan.places_of(step, self.rank, micro_batch)
                return collate_shard(samples, self.spec, self.cut, None if places is None else places.tolist(), towers)
            collate = partial(collate_packs if self.packing else collate_padded, towers=towers)
            return _collated(samples, self.spec, collate, skip_bad_media=self.skip_bad_media)
        except PacktoolError as error:
            return error


class GivenMicroBatches(Dataset["Batch | PacktoolError"]):
    """Its "indices" are the samples themselves, for micro-batches that no plan numbers.

    Args:
        spec: the model they are collated for.
        skip_bad_media: leave samples out whose media cannot be loaded.
        cut: of rows that several ranks share, and this rank's part.
    """

    def __init__(self, spec: InputSpec, *, skip_bad_media: bool = False, cut: Cut | None = None) -> None:
        self.spec = spec
        self.cut = cut
        self.skip_bad_media = skip_bad_media

    def __getitem__(self, samples: Sequence[EncodedSample]) -> Batch | PacktoolError:
        """The micro-batch, or the error that it met."""
        try:
            if self.cut is not None:
                return collate_shard(samples, self.spec, self.cut)
            return _collated(samples, self.spec, collate_packs, skip_bad_media=self.skip_bad_media)
        except PacktoolError as error:
            return error


def load_micro_batches(
    dataset: Dataset[Any],
    indices: Iterable[Any],
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    remedy: str = RESUME,
) -> Iterator[Batch]:
    """The micro-batches at some indices, made ahead of time by ``num_workers`` processes.

    Args:
        remedy: what a user may do if one of these processes dies, beside doing without them.

    Raises:
        PacktoolError: the one that a micro-batch met, once that micro-batch is reached; or a worker died.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=indices,
        num_workers=num_workers,
        worker_init_fn=begin_worker,
        collate_fn=_as_it_is,  # given one item, not a list, when there is no batch size
        pin_memory=pin_memory,
        # A generator of its own: the loader would otherwise draw from torch's, which dropout shares.
        generator=torch.Generator().manual_seed(0),
    )
    with deaths_told(remedy):
        for item in loader:
            if isinstance(item, PacktoolError):
                raise item
            yield item


def _collated(
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    collate: Callable[[Sequence[EncodedSample], InputSpec], Batch],
    *,
    skip_bad_media: bool,
) -> Batch:
    try:
        return collate(samples, spec)
    except MediaError:
        if not skip_bad_media:
            raise
    good, skipped = [], []
    for sample in samples:
        try:
            load_media([sample], spec)
            good.append(sample)
        except MediaError as error:
            skipped.append(SkippedSample(sample.source, sample.row, error.message, num_targets(sample)))
    return dataclasses.replace(collate(good, spec), skipped=tuple(skipped))


def is_bad(sample: EncodedSample, spec: InputSpec) -> bool:
    """Whether a sample's media cannot be loaded."""
    try:
        load_media([sample], spec)
    except MediaError:
        return True
    return False


def _as_it_is(item: Any) -> Any:
    return item
