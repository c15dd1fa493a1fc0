"""How long steps take on paper: a cost model of compute, communication, launching and memory, for any schedule.

N ranks share a micro-batch; each sequence is local to one of them or sharded over all. For rank j of a micro-batch

    linear(n)    = (n + n0) * f / (peak * matmul share)            n tokens on the rank, local ones and shards together
    local(j)     = its part of linear + sum of s (s + a0) * g / (peak * attention share)         local sequences
    sharded      = its part of linear + sum of s (s / N + a0) * g / (peak * attention share)     sharded sequences
    time(j)      = max(launches, max(communication, local(j)) + sharded)
    micro-batch  = max over j of time(j)
    step         = max over data-parallel ranks of the sum of their micro-batches + gradients out + weights back

with f FLOPs of a token and g of a unit of s^2 (``cost``; every token is taken for a target), both for forward and
backward, and once more forward with recomputation. So efficiency saturates as n / (n + n0): a kernel on few tokens
takes hardly less time than one on n0. A sharded sequence works on s / N queries at a time; that is what short sequences
lose by being sharded, besides ``communication``: in each layer keys and values are gathered in forward and in backward,
and their gradients scattered, each fixed below a size and linear above. Local work hides it (Skrull, arXiv 2505.19609,
section 3). Gradients and weights travel once a step, in the open.

Left out: towers of pictures and sounds, the optimizer's own time, loading, stragglers, congestion, and padding inside
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.plan.skrull import SHARDED
from packtool.plan.step_time import StepTime
from packtool.simulate.hardware import Hardware
from packtool.simulate.model_sizes import ModelSizes

Int64Array = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the model assumes of software, whatever the hardware.

    Args:
        matmul_half_tokens: n0, tokens on a rank at which matrix products reach half of their best speed. Reading 2-byte
            weights takes as long as 2 FLOPs a weight and token at peak / bandwidth = 295 tokens on an H100.
        attention_half_tokens: a0, the same for the queries of one sequence: the curves of FlashAttention-2 (Dao 2023,
            figures 4 to 6) are about half as high at 512 tokens as at 16K.
        kernels_per_layer: that a decoder layer of transformers launches in forward and backward, counted with torch's
            profiler on Qwen2's.
        launch_us: microseconds that one launch takes the CPU: a GPU is never faster than its launches.
        usable_memory: share of the memory that the model may fill, beside what allocator, CUDA and NCCL take.
    """

    matmul_half_tokens: float = 300.0
    attention_half_tokens: float = 512.0
    kernels_per_layer: int = 150
    launch_us: float = 5.0
    usable_memory: float = 0.92


@dataclass(frozen=True, eq=False)
class SimulatedSchedule:
    """K sequences in C micro-batches of some steps: what every strategy comes to.

    Args:
        sequence_parallel_size: N, ranks that share a micro-batch.
        num_groups: data-parallel ranks, of N devices each.
        num_steps: S.
        samples: int64 (K,), which sequences.
        tokens: int64 (K,), that each costs: its own, or with padding.
        places: int64 (K,), the rank of the group that it is local to, or ``SHARDED``.
        cells: int64 (K,), its micro-batch, rising.
        cell_steps, cell_groups: int64 (C,), step and data-parallel rank of each micro-batch, by step and then by rank.
    """

    sequence_parallel_size: int
    num_groups: int
    num_steps: int
    samples: Int64Array
    tokens: Int64Array
    places: Int64Array
    cells: Int64Array
    cell_steps: Int64Array
    cell_groups: Int64Array

    @property
    def num_cells(self) -> int:
        """The number C of micro-batches, over all steps and groups."""
        return len(self.cell_steps)


@dataclass(frozen=True, eq=False)
class Timing:
    """A schedule with its times.

    Args:
        local: (C, N), seconds of the sequences local to each rank.
        sharded: (C, N), seconds of the shards.
        communication: (C,), seconds that keys and values travel.
        ranks: (C, N), seconds until each rank is done.
        memory: (C, N), bytes on each rank.
        tokens: (C, N), tokens on each rank.
        synchronisation: seconds of gradients and weights, once a step.
    """

    schedule: SimulatedSchedule
    local: Seconds
    sharded: Seconds
    communication: Seconds
    ranks: Seconds
    memory: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    synchronisation: float

    @cached_property
    def exposed(self) -> Seconds:
        """(C, N): seconds of communication that no local work hides."""
        return np.maximum(self.communication[:, None] - self.local, 0.0)

    @cached_property
    def launching(self) -> Seconds:
        """(C, N): seconds in which a rank has nothing to do because its kernels are not launched yet."""
        working = np.maximum(self.communication[:, None], self.local) + self.sharded
        return np.maximum(self.ranks - working, 0.0)

    @cached_property
    def shares(self) -> dict[str, float]:
        """What the devices' time goes to, over all steps; the shares add up to 1."""
        total = float(self.step_seconds.sum()) * self.schedule.num_groups * self.schedule.sequence_parallel_size
        found = {
            "local": float(self.local.sum()),
            "sharded": float(self.sharded.sum()),
            "communication": float(self.exposed.sum()),
            "launching": float(self.launching.sum()),
            "synchronisation": total / float(self.step_seconds.mean()) * self.synchronisation,
        }
        found = {name: seconds / total for name, seconds in found.items()}
        return {**found, "waiting": max(1 - sum(found.values()), 0.0)}

    def sums(self, per_cell: npt.NDArray[Any]) -> Seconds:
        """(S, W / N): of each step and data-parallel rank."""
        plan = self.schedule
        return _sums(self._keys, per_cell, plan.num_steps * plan.num_groups).reshape(plan.num_steps, -1)

    @cached_property
    def busy(self) -> Seconds:
        """(S, W): seconds that each device computes."""
        parts = [self.sums(column) for column in (self.local + self.sharded).T]
        return np.stack(parts, axis=2).reshape(self.schedule.num_steps, -1)

    @cached_property
    def group_seconds(self) -> Seconds:
        """(S, W / N): until each data-parallel rank is done with its micro-batches."""
        return self.sums(self.ranks.max(axis=1))

    @cached_property
    def step_seconds(self) -> Seconds:
        """Seconds of each step, (S,): the slowest group, and the synchronisation."""
        return self.group_seconds.max(axis=1) + self.synchronisation

    @cached_property
    def waited(self) -> Seconds:
        """(S,): seconds of communication in the open, on the data-parallel rank that is done last."""
        slowest = self.group_seconds.argmax(axis=1)
        rank = self.ranks.argmax(axis=1)
        exposed = self.sums(self.exposed[np.arange(len(rank)), rank])
        return exposed[np.arange(len(slowest)), slowest] + self.synchronisation

    @property
    def _keys(self) -> Int64Array:
        return self.schedule.cell_steps * self.schedule.num_groups + self.schedule.cell_groups


def _sums(keys: Int64Array, values: npt.NDArray[Any], num: int) -> Seconds:
    """Sums of the values of each key, (num,)."""
    return np.asarray(np.bincount(keys, values, num), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model on devices: what a schedule is timed by.

    Args:
        sizes: of the model.
        hardware: of each device.
        constants: of the software.
        world_size: devices, over which gradients and optimizer are sharded.
        recompute: activations are computed again in backward, which costs a third more and saves memory.
    """

    sizes: ModelSizes
    hardware: Hardware
    world_size: int
    constants: Constants = Constants()
    recompute: bool = False

    def time(self, schedule: SimulatedSchedule) -> Timing:
        """Times and memory of every micro-batch on every rank."""
        sequence_parallel_size, num_cells = schedule.sequence_parallel_size, schedule.num_cells
        local = schedule.places != SHARDED
        key = schedule.cells * sequence_parallel_size + np.where(local, schedule.places, 0)

        def on_ranks(values: npt.NDArray[Any]) -> Seconds:
            return _sums(key[local], values[local], num_cells * sequence_parallel_size).reshape(
                num_cells, sequence_parallel_size
            )

        def on_all(values: npt.NDArray[Any]) -> Seconds:
            return _sums(schedule.cells[~local], values[~local], num_cells)[:, None]

        own, shards = on_ranks(schedule.tokens), on_all(schedule.tokens) / sequence_parallel_size
        tokens = own + shards
        linear = np.divide(self.linear_seconds(tokens), tokens, out=np.zeros_like(tokens), where=tokens > 0)
        own_seconds = linear * own + on_ranks(self.attention_seconds(schedule.tokens, 1))
        shard_seconds = linear * shards + on_all(self.attention_seconds(schedule.tokens, sequence_parallel_size))
        communication = self.communication_seconds(shards[:, 0] * sequence_parallel_size, sequence_parallel_size)
        ranks = np.maximum(communication[:, None], own_seconds) + shard_seconds
        ranks = np.where(tokens > 0, np.maximum(ranks, self.launch_seconds), ranks)
        return Timing(
            schedule=schedule,
            local=own_seconds,
            sharded=shard_seconds,
            communication=communication,
            ranks=ranks,
            memory=self.memory_bytes(tokens) + shards * sequence_parallel_size * self.sizes.kv_bytes,
            tokens=tokens,
            synchronisation=2 * self.hardware.collective_seconds(self.sizes.gradient_bytes, self.world_size),
        )

    @property
    def passes(self) -> float:
        """Matrix products in units of one forward and backward pass."""
        return 4 / 3 if self.recompute else 1.0

    @property
    def attention_passes(self) -> float:
        """Attention in units of one forward and backward pass, the latter two and a half times the former."""
        return 4.5 / 3.5 if self.recompute else 1.0

    @property
    def token_flops(self) -> float:
        """FLOPs of a token without attention, f in the formulas."""
        return self.sizes.cost.per_token + self.sizes.cost.per_target_token

    def linear_seconds(self, tokens: npt.NDArray[Any]) -> Seconds:
        """Time of the matrix products on so many tokens at once, of any shape; 0 for none."""
        speed = self.hardware.peak * self.hardware.matmul_share
        seconds = (tokens + self.constants.matmul_half_tokens) * (self.passes * self.token_flops / speed)
        return np.where(tokens > 0, seconds, 0.0)

    def attention_seconds(self, lengths: npt.NDArray[Any], sequence_parallel_size: int) -> Seconds:
        """Time of each sequence's attention on one of the ranks that share it."""
        speed = self.hardware.peak * self.hardware.attention_share
        queries = np.asarray(lengths, dtype=np.float64)
        work = queries * (queries / sequence_parallel_size + self.constants.attention_half_tokens)
        return work * (self.attention_passes * self.sizes.cost.per_square / speed)

    def communication_seconds(self, tokens: npt.NDArray[Any], sequence_parallel_size: int) -> Seconds:
        """Time to exchange K, V and their gradients in all layers, for so many sharded tokens over all ranks."""
        times = self.step_time(sequence_parallel_size)
        if sequence_parallel_size == 1:
            return np.zeros(len(tokens))
        moved = tokens * times.kv_bytes_per_token / times.bytes_per_second
        return np.where(tokens > 0, times.num_collectives * np.maximum(times.fixed_seconds, moved), 0.0)

    def step_time(self, sequence_parallel_size: int) -> StepTime:
        """What Skrull's planner is told of this machine: the same links, speeds and launches."""
        hardware, square = self.hardware, self.sizes.cost.per_square
        gathers = 3 + self.recompute  # forward, backward, gradients; and forward once more
        speed = hardware.peak * hardware.matmul_share / self.passes
        slower = speed / (hardware.peak * hardware.attention_share / self.attention_passes)
        return StepTime(
            flops_per_second=speed,
            num_collectives=gathers * self.sizes.num_layers,
            kv_bytes_per_token=float(self.sizes.kv_bytes),
            fixed_seconds=hardware.collective_seconds(1.0, sequence_parallel_size),
            bytes_per_second=hardware.bytes_per_second(sequence_parallel_size)
            if sequence_parallel_size > 1
            else float("inf"),
            square_flops=square * (slower - 1),
            query_flops=square * slower * self.constants.attention_half_tokens,
            launch_seconds=self.launch_seconds,
            device=hardware.name,
        )

    @property
    def launch_seconds(self) -> float:
        """Time that the CPU needs to launch a micro-batch, however small it is."""
        constants = self.constants
        return self.sizes.num_layers * constants.kernels_per_layer * constants.launch_us * 1e-6 * self.passes

    def memory_bytes(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Bytes of weights, gradients, optimizer states and the activations of so many tokens."""
        per_token = self.sizes.token_bytes(recompute=self.recompute)
        return np.asarray(self.sizes.state_bytes(self.world_size) + tokens * per_token)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device's memory that training can fill."""
        return self.hardware.memory_gb * 1e9 * self.constants.usable_memory

    def largest_bucket(self, sequence_parallel_size: int) -> int:
        """Tokens that fit on a device, with keys and values of a layer gathered from all that share; below 1 if none.

        In whole thousands where there are as many.
        """
        left = self.usable_bytes - self.sizes.state_bytes(self.world_size)
        gathered = self.sizes.kv_bytes * sequence_parallel_size if sequence_parallel_size > 1 else 0
        tokens = int(left // (self.sizes.token_bytes(recompute=self.recompute) + gathered))
        return tokens // 1000 * 1000 if tokens >= 1000 else tokens
