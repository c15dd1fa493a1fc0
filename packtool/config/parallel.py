"""How a packed sequence is spread over several processes: options of train, eval, verify, plan and simulate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from packtool.config.settings import option

SequenceParallelType = Literal["auto", "ulysses", "ring", "allgather"]

# The others do not take the lse of keys that they have not seen.
WITH_BLOCKS = ("auto", "sdpa", "varlen", "reference")
"""Values of ``--attn-impl`` for sequences that processes share: their results can be merged and differentiated."""


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """How a packed sequence is spread over several processes."""

    sequence_parallel_size: int | None = option(
        None,
        "Processes that share each packed sequence; the number of processes is a multiple of it. By default "
        "--ulysses-size times --ring-size.",
        panel="Sequence parallel",
        minimum=1,
        aliases=("model_parallel_size",),
    )
    sequence_parallel_type: SequenceParallelType = option(
        "auto",
        "How they attend: ulysses exchanges heads for tokens, ring passes K and V around, allgather collects K and V; "
        "auto takes what moves least, and says why.",
        panel="Sequence parallel",
    )
    ulysses_size: int | None = option(
        None,
        "Processes of the Ulysses axis of the mesh, next to each other; with --ring-size for both at once.",
        panel="Sequence parallel",
        minimum=1,
    )
    ring_size: int | None = option(
        None, "Processes of the ring axis of the mesh.", panel="Sequence parallel", minimum=1
    )

    @property
    def sequence_parallel_ranks(self) -> int:
        """Processes that share each packed sequence, P."""
        return self.sequence_parallel_size or (self.ulysses_size or 1) * (self.ring_size or 1)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options for how processes of several machines find each other, besides ``NNODES`` and its like."""

    ddp_timeout: int | None = option(
        None,
        "Seconds that processes and machines wait for each other; by default 1800.",
        panel="Sequence parallel",
        minimum=1,
    )

    @property
    def group_options(self) -> dict[str, timedelta]:
        """Keyword arguments of ``torch.distributed.init_process_group``."""
        return {} if self.ddp_timeout is None else {"timeout": timedelta(seconds=self.ddp_timeout)}


def parallel_problems(options: ParallelOptions, *, removes_padding: bool = True, attn_impl: str = "auto") -> list[str]:
    """Options of sequence parallelism that contradict each other.

    Args:
        removes_padding: samples share sequences: what can be spread over processes.
        attn_impl: kernel that is asked for.
    """
    found, size, kind = [], options.sequence_parallel_ranks, options.sequence_parallel_type
    named = {"--ulysses-size": options.ulysses_size, "--ring-size": options.ring_size}
    given = {name: number for name, number in named.items() if number is not None}
    told = " and ".join(f"{name} {number}" for name, number in given.items())
    product = math.prod(given.values())
    if size % product or (len(given) == len(named) and size != product):
        found.append(f"--sequence-parallel-size {size} is not what {told} come to: leave one of them out")
    elif kind == "ulysses" and size > (options.ulysses_size or size // (options.ring_size or 1)):
        found.append(f"--sequence-parallel-type ulysses has no ring: leave out {told}")
    elif kind in ("ring", "allgather") and size > 1 and options.ulysses_size == size:
        found.append(f"--sequence-parallel-type {kind}: with {told} there is no ring; leave one of them out")
    if kind != "auto" and size == 1:
        found.append(f"--sequence-parallel-type {kind} goes with --sequence-parallel-size")
    if size > 1 and not removes_padding:
        found.append("--sequence-parallel-size spreads sequences without padding: leave out --packing false")
    if size > 1 and attn_impl not in WITH_BLOCKS:
        found.append(
            f"--attn-impl {attn_impl} does not go with --sequence-parallel-size: use auto, which on CUDA is torch's "
            "own flash attention"
        )
    return found
