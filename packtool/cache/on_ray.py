"""Tasks on a Ray cluster: the same tasks, the same bytes, wherever they run.

Every actor holds one encoder, so that a tokenizer is loaded once. A task is idempotent, so one whose actor or machine
died is given to another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from packtool.cache.task import Report, Task, TaskResult, Work, run_task
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, PacktoolError
from packtool.launch.worker import tokenize_in_one_thread

_MOST_TRIES = 3


def run_tasks_on_ray(
    tasks: Sequence[Task], work: Work, num_actors: int, address: str | None, report: Report
) -> Iterator[TaskResult]:
    """Run tasks on actors and give their results as they finish, in any order.

    Args:
        num_actors: one core each.
        address: of a running cluster; None for ``RAY_ADDRESS``, or a Ray started on this machine for this run.
        report: told of each finished task.

    Raises:
        ConfigError: if Ray is not installed or the cluster is not there.
        PacktoolError: whatever a task raised; or a task's actor died three times.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--executor ray: Ray is not installed", "pip install packtool[ray]") from error
    started = not ray.is_initialized()
    if started:
        _connect(ray, address, num_actors)
    try:
        yield from _run(ray, tasks, work, num_actors, report)
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str | None, num_actors: int) -> None:
    settings: dict[str, Any] = {"address": address} if address else {"num_cpus": num_actors, "include_dashboard": False}
    try:
        ray.init(log_to_driver=False, logging_level="error", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray-address {address}: {error}", "Start the cluster, or check its address.") from error


def _run(ray: Any, tasks: Sequence[Task], work: Work, num_actors: int, report: Report) -> Iterator[TaskResult]:
    actor_class = ray.remote(num_cpus=1, max_restarts=0)(_Actor)
    waiting, tries = list(reversed(tasks)), dict.fromkeys((task.number for task in tasks), 0)
    running: dict[Any, tuple[Any, Task]] = {}

    def give(actor: Any) -> None:
        if waiting:
            task = waiting.pop()
            tries[task.number] += 1
            running[actor.run.remote(task)] = actor, task

    for _ in range(min(num_actors, len(tasks))):
        give(actor_class.remote(work))
    while running:
        (done, *_), _ = ray.wait(list(running), num_returns=1)
        actor, task = running.pop(done)
        try:
            result = ray.get(done)
        except ray.exceptions.RayActorError as error:
            if tries[task.number] == _MOST_TRIES:
                raise PacktoolError(
                    f"the Ray actor of shard {task.number} died {_MOST_TRIES} times: {error}",
                    "Run the same command again to go on after the finished shards, on machines with more memory.",
                ) from error
            waiting.append(task)
            give(actor_class.remote(work))
            continue
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        report(result.rows, sum(result.dropped.values()), sum(split.tokens for split in result.splits.values()))
        yield result
        give(actor)


class _Actor:
    """One process of the cluster."""

    def __init__(self, work: Work) -> None:
        tokenize_in_one_thread()
        self._work = work
        self._encoder = Encoder(work.spec, ModelFiles.load(work.spec.model, work.spec.chat_template))

    def run(self, task: Task) -> TaskResult:
        return run_task(task, self._encoder, self._work)
