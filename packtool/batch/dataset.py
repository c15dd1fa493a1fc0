"""The tensors of micro-batches, made ahead of time by worker processes.

What is said when a process that loads media beside the one of the model dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from packtool.batch.batch import B, Batch, SkippedSample
from packtool.batch.collate import collate_packs, collate_padded, collate_tree
from packtool.batch.collate_shard import collate_shard
from packtool.batch.media import load_media
from packtool.batch.micro_batch import MicroBatch, Tower
from packtool.batch.shard import Cut
from packtool.batch.spec import InputSpec
from packtool.cache.shard import num_targets
from packtool.encode.encoded import EncodedSample
from packtool.encode.prefix_hashes import changed_files
from packtool.errors import MediaError, PacktoolError
from packtool.launch.worker import begin_worker

RESUME = "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one"


@contextlib.contextmanager
def deaths_told(remedy: str = RESUME) -> Iterator[None]:
    """Around all that is done while workers load: torch tells of a dead one wherever this process happens to be.

    Args:
        remedy: what a user may do, beside doing without workers.

    Raises:
        PacktoolError: if a worker died.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise PacktoolError(
            f"a process that loads pictures died (killed, or out of memory?): {error}",
            f"{remedy}; --dataloader-num-workers 0 loads in the process of the model.",
        ) from error


class MicroBatches(Dataset["Batch | PacktoolError"]):
    """Turns a ``MicroBatch`` into tensors; its "indices" are the micro-batches themselves.

    Args:
        read: what gives a sample, from what a micro-batch has for it.
        spec: the model they are collated for.
        packing: False pads one sample a row instead.
        skip_bad_media: leave samples out whose media cannot be loaded.
        cuts: of sequences that so many ranks share, and this rank's part; the first is meant where a micro-batch does
            not say how many do. Sequences of one rank need none.
        always: towers that run in every micro-batch; by default all. Others run where some rank has need of them.
        min_shared: tokens that a prefix of packed samples must have to be there once; None has all samples whole.
        multiple_of: the length of rows without padding becomes one; see ``collate_packs``.
    """

    def __init__(
        self,
        read: Callable[[Any], EncodedSample],
        spec: InputSpec,
        *,
        packing: bool = True,
        skip_bad_media: bool = False,
        cuts: Mapping[int, Cut] | None = None,
        always: frozenset[Tower] | None = None,
        min_shared: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        assert min_shared is None or (packing and not cuts), "only samples of a pack of one rank share prefixes"
        self.read, self.spec, self.packing, self.min_shared = read, spec, packing, min_shared
        self.skip_bad_media, self.cuts, self.multiple_of = skip_bad_media, dict(cuts or {}), multiple_of
        self.always = spec.towers if always is None else always

    def __getitem__(self, wanted: MicroBatch) -> Batch | PacktoolError:
        """The micro-batch, or the error that it met: raised in a worker, it would lose its type and its remedy."""
        towers = self.spec.towers
        if wanted.towers is not None:
            towers &= self.always | wanted.towers
        try:
            samples = [self.read(sample) for sample in wanted.samples]
            if wanted.read_again is not None:
                found = zip(samples, wanted.read_again, strict=True)
                samples = [dataclasses.replace(sample, is_read_again=again) for sample, again in found]
            return with_reads(self._batch(samples, wanted, towers), self.spec)
        except PacktoolError as error:
            return error

    def _batch(self, samples: Sequence[EncodedSample], wanted: MicroBatch, towers: frozenset[Tower]) -> Batch:
        size = next(iter(self.cuts), 1) if wanted.shared_by is None else wanted.shared_by
        if size > 1:
            check_unchanged(samples, self.spec)
            places = None if wanted.places is None else list(wanted.places)
            return collate_shard(samples, self.spec, self.cuts[size], places, towers, multiple_of=self.multiple_of)
        collate = partial(self._collate, towers=towers)
        numbers = [each if isinstance(each, int) else None for each in wanted.samples]
        return _collated(samples, numbers, self.spec, collate, skip_bad_media=self.skip_bad_media)

    @property
    def _collate(self) -> Callable[..., Batch]:
        if self.min_shared is not None:
            return partial(collate_tree, min_shared=self.min_shared, multiple_of=self.multiple_of)
        return partial(collate_packs, multiple_of=self.multiple_of) if self.packing else collate_padded


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
    numbers: Sequence[int | None],
    spec: InputSpec,
    collate: Callable[[Sequence[EncodedSample], InputSpec], Batch],
    *,
    skip_bad_media: bool,
) -> Batch:
    try:
        check_unchanged(samples, spec)
        return collate(samples, spec)
    except MediaError:
        if not skip_bad_media:
            raise
    good, skipped = [], []
    for sample, number in zip(samples, numbers, strict=True):
        try:
            check_unchanged([sample], spec)
            load_media([sample], spec)
            good.append(sample)
        except MediaError as error:
            skipped.append(SkippedSample(sample.source, sample.row, error.message, num_targets(sample), number))
    return dataclasses.replace(collate(good, spec), skipped=tuple(skipped))


def check_unchanged(samples: Sequence[EncodedSample], spec: InputSpec) -> None:
    """Compare media in files with the hashes that the export kept. Price: four short reads of a file.

    Raises:
        MediaError: if one was replaced.
    """
    for sample in samples:
        files = changed_files(sample, spec.media_tokens, sample.prefix_hashes) if sample.prefix_hashes else []
        if files:
            which = files[0] + (f", or another of {len(files)} files," if len(files) > 1 else "")
            raise MediaError(
                f"{which} (row {sample.row} of {sample.source}) has changed since the export: it holds other bytes",
                "Put the file back, or export again into another --output-dir; "
                "packtool train --on-bad-media skip trains without its sample.",
            )


def with_reads(batch: B, spec: InputSpec) -> B:
    """A micro-batch that was just made, with what was asked of the media cache since the one before."""
    return batch if spec.media_cache is None else dataclasses.replace(batch, media_reads=spec.media_cache.taken())


def is_bad(sample: EncodedSample, spec: InputSpec) -> bool:
    """Whether a sample's media cannot be loaded."""
    try:
        check_unchanged([sample], spec)
        load_media([sample], spec)
    except MediaError:
        return True
    return False


def _as_it_is(item: Any) -> Any:
    return item
