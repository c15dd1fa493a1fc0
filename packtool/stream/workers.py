"""Blocks of rows encoded in worker processes, given back in the order in which they were read."""

from __future__ import annotations

import multiprocessing
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from packtool.config.data import EncodeSpec
from packtool.encode.blocks import encode_samples, samples_of
from packtool.encode.encoded import EncodedSample, left_out_of
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import PacktoolError, StoreDownError
from packtool.launch.worker import PipeWorker, begin_worker, end_with_parent, portable, tokenize_in_one_thread
from packtool.rows.sample import Dropped
from packtool.rows.source import RowBlock, Source
from packtool.stream.reading import Place, PlacedBlock

_Encoded = tuple[list[EncodedSample], list[Dropped]]


@dataclass(frozen=True, eq=False)
class EncodedBlock:
    """What became of a block's rows.

    Args:
        place: right before the block.
        samples: in the order of the rows.
        dropped: rows, and turns or responses of rows of which others are kept.
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
    idle: SimpleQueue[PipeWorker] = SimpleQueue()
    workers: list[PipeWorker] = []
    # A thread waits for each worker, so that blocks are encoded while the caller does something else.
    threads = ThreadPoolExecutor(num_proc)
    waiting = deque[tuple[Place, Future[_Encoded]]]()
    try:
        for _ in range(num_proc):
            workers.append(PipeWorker(context, _work, spec))
            idle.put(workers[-1])
        more = True
        while True:
            while more and len(waiting) < num_ahead:
                if (found := next(blocks, None)) is None:
                    more = False
                else:
                    waiting.append((found.place, threads.submit(_ask, idle, found.source, found.block)))
            if not waiting:
                return
            place, future = waiting.popleft()
            yield EncodedBlock(place, *future.result())
    finally:
        for _, future in waiting:
            future.cancel()
        for worker in workers:
            worker.kill()
        threads.shutdown(wait=True, cancel_futures=True)


def _ask(idle: SimpleQueue[PipeWorker], source: Source, block: RowBlock) -> _Encoded:
    """Have a block encoded by the next worker that is free; in a thread of its own.

    Raises:
        PacktoolError: what the worker met, or that it died.
    """
    worker = idle.get()
    try:
        worker.pipe.send((source, block))
        told: _Encoded | BaseException = worker.pipe.recv()
    except (EOFError, OSError):
        raise PacktoolError(
            "a worker process that encodes rows died (killed, or out of memory?)",
            "--resume-from-checkpoint true goes on from the newest checkpoint, if there is one; fewer "
            "--dataset-num-proc need less memory.",
        ) from None
    finally:
        idle.put(worker)
    if isinstance(told, StoreDownError):
        raise told.going_on("--resume-from-checkpoint true goes on from the newest checkpoint, if there is one.")
    if isinstance(told, BaseException):
        raise told
    return told


def _work(spec: EncodeSpec, pipe: Connection) -> None:
    """Encode blocks as they come, until the pipe closes: the main function of a worker process."""
    begin_worker()
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenize_in_one_thread()
    with suppress(EOFError, OSError):  # nobody asks or listens any more
        try:
            encoder = Encoder(spec, ModelFiles.load(spec.model, spec.chat_template))
        except Exception as error:
            pipe.send(portable(error))
            return
        while True:
            source, block = pipe.recv()
            try:
                told: _Encoded | Exception = _encode(encoder, source, block)
            except Exception as error:
                told = portable(error)
            pipe.send(told)


def _encode(encoder: Encoder, source: Source, block: RowBlock) -> _Encoded:
    samples: list[EncodedSample] = []
    dropped: list[Dropped] = []
    group = list(samples_of(source, [block], may_hold_secrets=False))
    for item in encode_samples(group, encoder):
        if isinstance(item, Dropped):
            dropped.append(item)
        else:
            samples += item
            dropped += left_out_of(item)
    return samples, dropped
