"""Number of processes that load data for a rank, and advice if steps wait for data."""

from __future__ import annotations

import math
import os

from packtool.launch.world import processes_of_machine
from packtool.train.prepare.run import Run

SECONDS_PER_MEDIA_TOKEN = 0.4 / 8192
"""Loading time on one core, where it is not measured."""
_SECONDS_OF_A_WORKER = 0.1
_MAX_WORKERS = 8
_MIN_WAITING_SHARE = 0.05
_MIN_WAITED_SECONDS = 10.0


def choose_workers(media_seconds: float, cores: int) -> int:
    """Loading processes of a rank: one for each 0.1 s in which one core loads the media of a micro-batch."""
    return max(min(math.ceil(media_seconds / _SECONDS_OF_A_WORKER), cores - 1, _MAX_WORKERS), 1)


def workers_of(run: Run, seconds_per_media_token: float = SECONDS_PER_MEDIA_TOKEN) -> int:
    """The number of loading processes: ``--dataloader-num-workers``, or by media of the first stage and cores."""
    if run.config.dataloader_num_workers is not None:
        return run.config.dataloader_num_workers
    config, _ = run.step_configs[0]
    media_tokens_of_rank = run.source.media_tokens() / config.sequence_parallel_ranks
    return choose_workers(media_tokens_of_rank * seconds_per_media_token, cores_of_a_rank())


def cores_of_a_rank() -> int:
    """Cores of this machine for each of the processes that torchrun started on it; all of them without torchrun."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(num_cores // processes_of_machine(), 1)


class WaitingNote:
    """Advice, given once, if the steps of a rank wait for data; ``num_workers`` and ``cores`` are those of the rank."""

    def __init__(self, num_workers: int, cores: int) -> None:
        self._num_workers, self._cores = num_workers, cores
        self._waited_seconds = self._seconds = 0.0
        self._skipped_first = self._is_shown = False

    def add_steps(self, data_wait: float, seconds: float) -> str | None:
        """Add ``seconds`` of steps, of which the fraction ``data_wait`` was spent waiting; return advice if due."""
        if not self._skipped_first:
            # The first step waits for processes to start, so it does not count.
            self._skipped_first = True
            return None
        self._waited_seconds += data_wait * seconds
        self._seconds += seconds
        waits_long = (
            self._waited_seconds >= _MIN_WAITED_SECONDS and self._waited_seconds >= _MIN_WAITING_SHARE * self._seconds
        )
        if self._is_shown or not waits_long:
            return None
        self._is_shown = True
        return self._advice(f"steps wait {self._waited_seconds / self._seconds:.0%} of their time for data")

    def _advice(self, wait: str) -> str:
        """Advise more workers if cores are free, else faster loading; ``wait`` describes the waiting."""
        processes = f"{self._num_workers} process{'' if self._num_workers == 1 else 'es'}"
        max_workers = self._cores - 1  # one core trains
        if self._num_workers < max_workers:
            num_advised = min(2 * max(self._num_workers, 1), max_workers)
            return (
                f"{wait}: try --dataloader-num-workers {num_advised} "
                f"(now {processes} per rank, which has {self._cores} cores)"
            )
        return (
            f"{wait}: {processes} per rank load it, and no more cores are free ({self._cores} per rank). Media load "
            "faster from --media-cache, from a local disk, or exported with a smaller --max-pixels"
        )
