"""Processes that share a packed sequence for ``bench_sequence_parallel.py``: steps of a small model, and their price.

``Ranks`` is held by the benchmark, everything below ``run_rank`` by the processes. They live as long as the benchmark,
so that ways can take turns without a start in between. A step is forward and backward of one sequence: gradients are
not averaged and no weight moves, for that costs all ways the same.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from packtool.attention.parallel import attend
from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import set_attention
from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs, collate_padded
from packtool.batch.collate_shard import collate_shard
from packtool.batch.spec import InputSpec
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.planning.towers import assign_heaviest_first
from packtool.train.model.loss import HeadLoss
from scripts._gpu_models import SIZES, Size, make_model, text_config
from scripts._kept import Kept
from scripts._reduced_model import TEXT, VOCABULARY

MODELS = {"reduced": Size(TEXT | {"vocab_size": VOCABULARY, "tie_word_embeddings": True}, {}, recompute=False), **SIZES}
PACKED, PADDED, WHOLE = "packed", "padded", "whole documents"
SHARING = ("ulysses", "ring", "allgather")

_RINGS: Mapping[str, Literal["ring", "allgather"]] = {"ring": "ring", "allgather": "allgather", WHOLE: "ring"}

_CHUNK_LOGITS = 2**20
"""Logits made at a time, few: the head's memory would hide the decoder's, which is all there is to share."""

# The part of a tensor that leaves a rank, of N that exchange it.
_SENT: Mapping[str, Callable[[int], float]] = {
    "start_ring_transfer": lambda size: 1,
    "start_all_gather": lambda size: size - 1,
    "reduce_scatter_rows": lambda size: (size - 1) / size,
    "scatter_heads": lambda size: (size - 1) / size,
    "gather_heads": lambda size: (size - 1) / size,
}


@dataclass(frozen=True)
class Work:
    """What is measured, the same for all.

    Args:
        lengths: of the documents of the sequence.
        model: of ``MODELS``.
        device: ``cpu`` or ``cuda``.
    """

    lengths: tuple[int, ...]
    model: str
    device: str


@dataclass(frozen=True)
class Step:
    """What one rank needed for a step.

    Args:
        num_tokens: that it computed, padding included.
        num_sequence_tokens: of the sequence that the ranks shared, with the padding of its documents.
        loss: its share, of the sum over all targets.
        kept: bytes that wait for the backward pass, without weights.
        peak: most bytes above what was there before, NaN if nobody knows.
        sent: bytes that left it in the forward pass.
        sent_back: in the backward pass.
    """

    num_tokens: int
    num_sequence_tokens: int
    loss: float
    kept: int
    peak: float
    sent: float
    sent_back: float


class Ranks:
    """P processes that wait to be told what to measure; to be closed.

    Args:
        work: what.
        size: P.
        folder: empty, where they find each other.
    """

    def __init__(self, work: Work, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        # Torch is imported once and not by each of them.
        context.set_forkserver_preload([__name__])
        self.size = size
        pipes = [context.Pipe() for _ in range(size)]
        self._ends = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=run_rank, args=(work, rank, size, folder / f"ranks-{size}", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def step(self, way: str) -> list[Step]:
        """Run a step in one way; what each rank found, by rank."""
        return self._ask("step", way)

    def seconds(self, way: str) -> tuple[float, float]:
        """Seconds of a step from when all begin until the last is done, and seconds of all cores together."""
        whole, of_cores = zip(*self._ask("seconds", way), strict=True)
        return max(whole), sum(of_cores)

    def _ask(self, what: str, way: str) -> list[Any]:
        for end in self._ends:
            end.send((what, way))
        answers: dict[Any, Any] = {}
        while len(answers) < self.size:
            # Whoever speaks first: those that wait for one that has ended never do.
            speaking: list[Any] = wait([end for end in self._ends if end not in answers])
            for end in speaking:
                try:
                    answers[end] = end.recv()
                except EOFError:
                    raise RuntimeError(f"{way} over {self.size}: a process ended, and said why above") from None
        return [answers[end] for end in self._ends]


def run_rank(work: Work, rank: int, size: int, store: Path, asked: Connection) -> None:
    """What each process does until it is ended."""
    if work.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        # All P together use as many cores as one does.
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
    if size > 1:
        backend = "nccl" if work.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    stepper = _Stepper(work, rank, size)
    while (question := _next(asked)) is not None:
        what, way = question
        asked.send(getattr(stepper, what)(way))


def _next(asked: Connection) -> tuple[str, str] | None:
    try:
        found: tuple[str, str] = asked.recv()
    except EOFError:  # whoever asked is gone
        return None
    return found


class _Stepper:
    """Makes steps of one rank."""

    def __init__(self, work: Work, rank: int, size: int) -> None:
        self.device = torch.device(f"cuda:{rank}" if work.device == "cuda" else "cpu")
        config = text_config(MODELS[work.model])
        self.model = make_model(config, self.device, torch.bfloat16 if work.device == "cuda" else torch.float32)
        # Weights of a fresh model are so small that what it attends to hardly matters.
        for parameter in (each for each in self.model.parameters() if each.ndim > 1):
            nn.init.normal_(parameter, std=0.05)
        self.head_loss = HeadLoss(self.model, _CHUNK_LOGITS)
        self.samples = _random_samples(work.lengths, config.vocab_size)
        self.spec = InputSpec("", config, MediaLimits())
        self.size, self._ways = size, dict[str, tuple[Batch, SequenceParallel | None]]()

    def step(self, way: str) -> Step:
        """Two steps: one to count, one for the peak."""
        batch = self._prepare(way)
        kept = Kept(self.model)
        with _counted_exchanges() as sent, kept:
            loss = self._loss(batch)
        with _counted_exchanges() as sent_back:
            loss.backward()
        found = float(loss.detach())
        del loss
        peak = _Peak(self.device)
        self._loss(batch).backward()
        num_tokens = batch.input_ids.numel()
        num_sequence_tokens = sum(getattr(batch, "lengths", (num_tokens,)))
        return Step(num_tokens, num_sequence_tokens, found, kept.num_bytes, peak.num_bytes(), sum(sent), sum(sent_back))

    def seconds(self, way: str) -> tuple[float, float]:
        """One step, and what this process's threads were busy with it."""
        batch = self._prepare(way)
        self._wait()
        begin, busy = time.perf_counter(), time.process_time()
        self._loss(batch).backward()
        self._wait()
        return time.perf_counter() - begin, time.process_time() - busy

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            dist.barrier()

    def _loss(self, batch: Batch) -> Tensor:
        # Gradients of weights are there already and are added to: a step does not make memory for them.
        return self.head_loss.losses(self.model, batch).weighted_sum()

    def _prepare(self, way: str) -> Batch:
        """The rank's part of the sequence, and a model that knows what to do with it."""
        if way not in self._ways:
            self._ways[way] = self._assigned(way)
        batch, parallel = self._ways[way]
        if way == PADDED:
            self.model.set_attn_implementation("sdpa")
        else:
            set_attention(self.model, parallel=parallel)
        return batch

    def _assigned(self, way: str) -> tuple[Batch, SequenceParallel | None]:
        parallel, places = None, None
        batch: Batch
        if way in (PACKED, PADDED):
            batch = (collate_packs if way == PACKED else collate_padded)(self.samples, self.spec)
        else:
            axes = Axes(1, self.size) if way == "ulysses" else Axes(self.size, 1, _RINGS[way])
            parallel = SequenceParallel.on_mesh(axes, self.device.type)
            if way == WHOLE:
                places = assign_heaviest_first([sample.length for sample in self.samples], [0] * self.size).tolist()
            batch = collate_shard(self.samples, self.spec, parallel.split, places)
        return batch.to(self.device), parallel


def _random_samples(lengths: tuple[int, ...], vocabulary: int) -> list[EncodedSample]:
    """The second half of each is what it learns."""
    generator = np.random.default_rng(0)
    found = []
    for number, length in enumerate(lengths):
        ids = generator.integers(0, vocabulary, length, dtype=np.int32)
        labels = np.where(np.arange(length) < length // 2, np.int32(IGNORE_INDEX), ids)
        found.append(EncodedSample(ids, labels, np.zeros(0, np.int32), (), None, "random", number))
    return found


@contextmanager
def _counted_exchanges() -> Iterator[list[float]]:
    """The bytes of everything that this rank sends inside."""
    sent: list[float] = []

    def counting(function: Callable[..., Any], part: Callable[[int], float]) -> Callable[..., Any]:
        def exchange(tensor: Tensor, group: Any) -> Any:
            sent.append(tensor.nbytes * part(dist.get_world_size(group)))
            return function(tensor, group)

        return exchange

    with ExitStack() as stack:
        for name, part in _SENT.items():
            stack.enter_context(patch.object(attend, name, counting(getattr(attend, name), part)))
        yield sent


class _Peak:
    """The most memory from now on, above what there is now: of the process (Linux), or of its GPU's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: float = torch.cuda.memory_allocated(device)
            return
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            # Freed memory that the process has kept would be used again, and not be counted.
            libc.malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        except OSError:
            self._before = math.nan
        else:
            self._before = _status("VmRSS")

    def num_bytes(self) -> float:
        """The highest number of bytes above those at the beginning, so far; NaN if it is not known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return self._before if math.isnan(self._before) else _status("VmHWM") - self._before


def _status(name: str) -> float:
    """A figure of memory of this process, in bytes, by its name in ``/proc``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
