"""Loading and collation of planned micro-batches in data worker processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from packtool.batch.batch import B, Batch, ShardedBatch, SkippedSample
from packtool.batch.collate import collate_packs, collate_padded, collate_tree
from packtool.batch.collate_shard import collate_shard
from packtool.batch.media import load_media
from packtool.batch.micro_batch import MicroBatch, Tower
from packtool.batch.shard import SequenceSplit
from packtool.batch.spec import InputSpec
from packtool.cache.shard import num_targets
from packtool.encode.encoded import EncodedSample
from packtool.encode.prefix_hashes import changed_files
from packtool.errors import MediaError, PacktoolError
from packtool.launch.worker import begin_worker

RESUME = "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one"


@contextlib.contextmanager
def explain_dead_workers(remedy: str = RESUME) -> Iterator[None]:
    """Turn torch's error about a dead data worker into a PacktoolError that gives the user a ``remedy``."""
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
    """Dataset that turns a ``MicroBatch`` into tensors; its "indices" are the micro-batches themselves.

    Args:
        read: reads a sample, given an element of ``MicroBatch.samples``.
        packing: False pads one sample per row instead.
        splits: by sequence parallel size, how ranks split a sequence, and this rank's number among them. The first size
            is that of micro-batches that name none. Size 1 needs no entry.
        required_towers: towers that run in every micro-batch; None for all. Others run if any rank has media for them.
        min_shared: minimum length in tokens of a common prefix that is computed once; None shares no prefixes.
    """

    def __init__(
        self,
        read: Callable[[Any], EncodedSample],
        spec: InputSpec,
        *,
        packing: bool = True,
        skip_bad_media: bool = False,
        splits: Mapping[int, SequenceSplit] | None = None,
        required_towers: frozenset[Tower] | None = None,
        min_shared: int | None = None,
        pad_to_multiple_of: int = 1,
    ) -> None:
        assert min_shared is None or packing, "only samples of a pack share prefixes"
        self.read = read
        self.spec = spec
        self.skip_bad_media = skip_bad_media
        self.splits = dict(splits or {})
        self._default_num_ranks = next(iter(self.splits), 1)  # the first size, or 1 without any
        self.pad_to_multiple_of = pad_to_multiple_of
        self.min_shared = min_shared
        self.required_towers = spec.towers if required_towers is None else required_towers
        # Makes a batch of (samples, spec, towers) for a micro-batch that no other rank shares.
        self._collate_local: Callable[..., Batch]
        if min_shared is not None:
            self._collate_local = partial(collate_tree, min_shared=min_shared, pad_to_multiple_of=pad_to_multiple_of)
        elif packing:
            self._collate_local = partial(collate_packs, pad_to_multiple_of=pad_to_multiple_of)
        else:
            self._collate_local = collate_padded

    def __getitem__(self, micro_batch: MicroBatch) -> Batch | PacktoolError:
        """Return the micro-batch or its error; an error raised in a worker process would lose its type and remedy."""
        try:
            samples = [self.read(sample) for sample in micro_batch.samples]
            if micro_batch.read_again is not None:
                pairs = zip(samples, micro_batch.read_again, strict=True)
                samples = [dataclasses.replace(sample, is_read_again=again) for sample, again in pairs]
            return with_media_reads(self._collate_loaded(samples, micro_batch), self.spec)
        except PacktoolError as error:
            return error

    def _collate_loaded(self, samples: Sequence[EncodedSample], micro_batch: MicroBatch) -> Batch:
        """Load the media of a micro-batch's samples and collate them.

        With ``skip_bad_media``, leave out samples whose media cannot be loaded, unless several ranks share the samples.
        """
        num_ranks = micro_batch.sequence_parallel_size or self._default_num_ranks
        try:
            check_unchanged(samples, self.spec)
            if num_ranks > 1:
                return self._collate_shard(samples, micro_batch, self.splits[num_ranks])
            return self._collate_local(samples, self.spec, towers=self._towers_to_run(micro_batch))
        except MediaError:
            if num_ranks > 1 or not self.skip_bad_media:
                raise
        good_samples, skipped = self._separate_bad_media(samples, micro_batch)
        batch = self._collate_local(good_samples, self.spec, towers=self._towers_to_run(micro_batch))
        return dataclasses.replace(batch, skipped=tuple(skipped))

    def _collate_shard(
        self, samples: Sequence[EncodedSample], micro_batch: MicroBatch, split: SequenceSplit
    ) -> ShardedBatch:
        return collate_shard(
            samples,
            self.spec,
            split,
            micro_batch.placement,
            self._towers_to_run(micro_batch),
            pad_to_multiple_of=self.pad_to_multiple_of,
            min_shared=self.min_shared,
        )

    def _towers_to_run(self, micro_batch: MicroBatch) -> frozenset[Tower]:
        """Return the towers that every rank runs: all of them if it is unknown which have media."""
        if micro_batch.towers is None:
            return self.spec.towers
        return self.spec.towers & (self.required_towers | micro_batch.towers)

    def _separate_bad_media(
        self, samples: Sequence[EncodedSample], micro_batch: MicroBatch
    ) -> tuple[list[EncodedSample], list[SkippedSample]]:
        """Separate samples whose media cannot be loaded, after loading the media of each sample alone.

        If a sample is in the micro-batch several times and one copy fails, all its copies are left out. ``samples`` are
        those of ``micro_batch``, already read.

        Returns:
            The samples whose media load, and records of the others, both in the order of ``samples``.
        """
        # Copies of a sample have the same key: its position in the caches. In a stream, which has no positions, each
        # sample has a key of its own.
        is_stream = not all(isinstance(planned, int) for planned in micro_batch.samples)
        keys = range(len(samples)) if is_stream else micro_batch.samples
        message_by_key: dict[int, str] = {}
        for key, sample in zip(keys, samples, strict=True):
            error = sample_media_error(sample, self.spec)
            if error is not None:
                message_by_key[key] = error.message

        good_samples: list[EncodedSample] = []
        skipped: list[SkippedSample] = []
        for index, (key, sample) in enumerate(zip(keys, samples, strict=True)):
            if key not in message_by_key:
                good_samples.append(sample)
                continue
            message = message_by_key[key]
            cache_position = None if is_stream else key
            record = SkippedSample(sample.source, sample.row, message, num_targets(sample), index, cache_position)
            skipped.append(record)
        return good_samples, skipped


def load_micro_batches(
    dataset: Dataset[Any],
    indices: Iterable[Any],
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    remedy: str = RESUME,
) -> Iterator[Batch]:
    """Yield the tensors of planned micro-batches in order, prepared in advance by ``num_workers`` processes.

    ``dataset`` maps each of ``indices`` (of ``MicroBatches``, the planned micro-batches themselves) to a batch, or to a
    PacktoolError, which is raised here. If a process dies, a PacktoolError with ``remedy`` is raised.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,  # each item is a complete micro-batch
        sampler=indices,
        num_workers=num_workers,
        worker_init_fn=begin_worker,
        collate_fn=_unchanged,  # without a batch size, it is called with one item, not a list
        pin_memory=pin_memory,
        # Without a generator of its own, the loader would draw from torch's, whose numbers dropout uses.
        generator=torch.Generator().manual_seed(0),
    )
    with explain_dead_workers(remedy):
        for item in loader:
            if isinstance(item, PacktoolError):
                raise item
            yield item


def check_unchanged(samples: Sequence[EncodedSample], spec: InputSpec) -> None:
    """Raise a MediaError if a medium's file was replaced since the export; the cost is four short reads per file."""
    for sample in samples:
        files = changed_files(sample, spec.media_tokens, sample.prefix_hashes) if sample.prefix_hashes else []
        if files:
            which = files[0] + (f", or another of {len(files)} files," if len(files) > 1 else "")
            raise MediaError(
                f"{which} (row {sample.row} of {sample.source}) has changed since the export: it holds other bytes",
                "Put the file back, or export again into another --output-dir; "
                "packtool train --on-bad-media skip trains without its sample.",
            )


def sample_media_error(sample: EncodedSample, spec: InputSpec) -> MediaError | None:
    """Load a sample's media and return the error; None if they load."""
    try:
        check_unchanged([sample], spec)
        load_media([sample], spec)
    except MediaError as error:
        return error
    return None


def with_media_reads(batch: B, spec: InputSpec) -> B:
    """Add the media cache's reads since the previous micro-batch to one that was just made."""
    return batch if spec.media_cache is None else dataclasses.replace(batch, media_reads=spec.media_cache.take_reads())


def _unchanged(item: Any) -> Any:
    return item
