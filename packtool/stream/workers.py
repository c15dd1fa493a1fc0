"""Blocks of rows encoded in worker processes, given back in the order in which they were read."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass

from packtool.cache.pool import end_with_parent, kill
from packtool.config.export import EncodeSpec
from packtool.encode.blocks import encode_samples, samples_of
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import PacktoolError
from packtool.rows.sample import Dropped
from packtool.rows.source import Block, Source
from packtool.stream.reading import Place, PlacedBlock

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, eq=False)
class EncodedBlock:
    """What became of a block's rows.

    Args:
        place: right before the block.
        samples: in the order of the rows.
    """

    place: Place
    samples: list[EncodedSample]
    dropped: list[Dropped]


def encoded_blocks(
    blocks: Iterator[PlacedBlock], spec: EncodeSpec, *, num_proc: int, num_ahead: int
) -> Iterator[EncodedBlock]:
    """Encode blocks, ``num_ahead`` of them before they are asked for.

    Args:
        num_proc: worker processes; the result is the same for any number.

    Raises:
        PacktoolError: what a block met, or that a worker died.
    """
    # Forked workers would inherit locks that the tokenizer's or torch's threads may hold.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=(spec,))
    waiting = deque[tuple[Place, Future[tuple[list[EncodedSample], list[Dropped]]]]]()
    try:
        more = True
        while True:
            while more and len(waiting) < num_ahead:
                if (found := next(blocks, None)) is None:
                    more = False
                else:
                    with _signals_wait():
                        future = pool.submit(_encode, found.source, found.block)
                    waiting.append((found.place, future))
            if not waiting:
                return
            place, future = waiting.popleft()
            yield EncodedBlock(place, *future.result())
    except BrokenProcessPool:
        raise PacktoolError(
            "a worker process that encodes rows died (killed, or out of memory?)",
            "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one; fewer "
            "--dataset-num-proc need less memory.",
        ) from None
    finally:
        kill(pool)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Around what may start workers: they inherit that signals wait, until they have learned to ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_encoder: Encoder | None = None


def _start_worker(spec: EncodeSpec) -> None:
    global _encoder
    # What reaches a whole group is answered by the parent, which ends its workers by other means.
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_PARENT)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # The workers are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template))


def _encode(source: Source, block: Block) -> tuple[list[EncodedSample], list[Dropped]]:
    assert _encoder is not None, "the pool's initializer ran first"
    samples: list[EncodedSample] = []
    dropped: list[Dropped] = []
    group = list(samples_of(source, [block], may_hold_secrets=False))
    for item in encode_samples(group, _encoder):
        if isinstance(item, Dropped):
            dropped.append(item)
        else:
            samples += item
    return samples, dropped
