"""How long steps take on paper: a cost model of compute, communication, launching and memory, for any schedule.

N ranks share a micro-batch; each sequence is local to one of them or sharded over all. For rank j of a micro-batch

    linear(n)    = ((n + n0) * f + targets * h) / (peak * matmul share)      n tokens on the rank, local ones and shards
                   and attention in sliding layers, by what each sequence has in their windows
    local(j)     = its part of linear + sum of s (s + a0) * g / (peak * attention share)         local sequences
    sharded      = its part of linear + sum of s (s / N + a0) * g / (peak * attention share)     sharded sequences
    exposed(j)   = what its attention does not hide of the exchanges of keys, values and gradients (``exchanges_of``)
    time(j)      = max(launches, local(j) + sharded + exposed(j))
    micro-batch  = max over j of time(j)
    step         = when the device is done that is done last + gradients out + weights back

with f FLOPs of a token, h of a target and g of a unit of s^2 (``cost``), all for forward and backward, and once more
forward with recomputation. So efficiency saturates as n / (n + n0): a kernel on few tokens takes hardly less time than
one on n0. A sharded sequence works on s / N queries at a time; that is what short sequences lose by being sharded,
besides the exchanges. Gradients and weights travel once a step, in the open (ZeRO-2).

With weights that are sharded, too (ZeRO-3), those of each layer are gathered ahead of it, forward and backward: a
micro-batch takes no less than all of them need to travel, and the micro-batches of all devices run in lock-step.

Left out: towers of pictures and sounds, the optimizer's own time, loading, stragglers, congestion, and padding inside
kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.config.packing import SequenceParallelType
from packtool.planning.cost import ModelSizes
from packtool.planning.skrull import SHARDED
from packtool.planning.step_time import Exchange, StepTime
from packtool.simulate.hardware import Hardware

Int64Array = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]

_GATHERED = 4
"""What all-gather holds of a layer for each token of the group, in units of ``kv_bytes``: K and V, a copy of what is
seen, and gradients of 32 bits. The other ways hold less, and are charged as much."""


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
    """K sequences in C micro-batches of some steps on W devices: what every strategy comes to.

    Micro-batches that share devices run one after the other, as they are listed. Of two that do, the devices of the
    later one are among those of the earlier, so that all of them begin it together.

    Args:
        num_devices: W.
        num_steps: S.
        samples: int64 (K,), which sequences.
        tokens: int64 (K,), that each costs: its own, or with padding.
        places: int64 (K,), the rank of its micro-batch that it is local to, or ``SHARDED``.
        cells: int64 (K,), its micro-batch, rising.
        cell_steps: int64 (C,), step of each micro-batch, rising.
        cell_ranks: int64 (C,), N: devices that share it.
        cell_devices: int64 (C,), the first of these; the others follow it.
    """

    num_devices: int
    num_steps: int
    samples: Int64Array
    tokens: Int64Array
    places: Int64Array
    cells: Int64Array
    cell_steps: Int64Array
    cell_ranks: Int64Array
    cell_devices: Int64Array

    @property
    def num_cells(self) -> int:
        """The number C of micro-batches, over all steps and devices."""
        return len(self.cell_steps)

    @cached_property
    def row_starts(self) -> Int64Array:
        """int64 (C,): a row stands for a device's part of a micro-batch; this is the first row of each."""
        return np.cumsum(self.cell_ranks) - self.cell_ranks

    @cached_property
    def row_cells(self) -> Int64Array:
        """int64 (R,): the micro-batch of each row."""
        return np.repeat(np.arange(self.num_cells), self.cell_ranks)

    @cached_property
    def row_devices(self) -> Int64Array:
        """int64 (R,): the device of each row."""
        return np.arange(len(self.row_cells)) - self.row_starts[self.row_cells] + self.cell_devices[self.row_cells]

    @cached_property
    def row_keys(self) -> Int64Array:
        """int64 (R,): step and device of each row, as one number."""
        return self.cell_steps[self.row_cells] * self.num_devices + self.row_devices

    @cached_property
    def rounds(self) -> Int64Array:
        """int64 (C,): how many micro-batches the busiest of its devices has before it in its step."""
        order = np.argsort(self.row_keys, kind="stable")
        keys = self.row_keys[order]
        first = np.searchsorted(keys, keys)
        place = np.empty(len(keys), np.int64)
        place[order] = np.arange(len(keys)) - first
        return np.maximum.reduceat(place, self.row_starts)


@dataclass(frozen=True, eq=False)
class Timing:
    """A schedule with its times; R rows, see ``SimulatedSchedule.row_cells``.

    Args:
        local: (R,), seconds of the sequences local to each rank.
        sharded: (R,), seconds of the shards.
        exposed: (R,), seconds of exchanges in the open.
        ranks: (R,), seconds until each rank is done.
        memory: (R,), bytes on each rank.
        tokens: (R,), tokens on each rank.
        synchronisation: seconds of gradients and weights, once a step.
        in_step: micro-batches of all devices run in lock-step.
    """

    schedule: SimulatedSchedule
    local: Seconds
    sharded: Seconds
    exposed: Seconds
    ranks: Seconds
    memory: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    synchronisation: float
    in_step: bool = False

    @cached_property
    def launching(self) -> Seconds:
        """(R,): seconds in which a rank has nothing to do because kernels are not launched, or weights not there."""
        return np.maximum(self.ranks - self.local - self.sharded - self.exposed, 0.0)

    @cached_property
    def shares(self) -> dict[str, float]:
        """What the devices' time goes to, over all steps; the shares add up to 1."""
        total = float(self.step_seconds.sum()) * self.schedule.num_devices
        found = {
            "local": float(self.local.sum()),
            "sharded": float(self.sharded.sum()),
            "communication": float(self.exposed.sum()),
            "launching": float(self.launching.sum()),
            "synchronisation": total / float(self.step_seconds.mean()) * self.synchronisation,
        }
        found = {name: seconds / total for name, seconds in found.items()}
        return {**found, "waiting": max(1 - sum(found.values()), 0.0)}

    def sums(self, per_row: npt.NDArray[Any]) -> Seconds:
        """(S, W): of each step and device."""
        plan = self.schedule
        return _sums(plan.row_keys, per_row, plan.num_steps * plan.num_devices).reshape(plan.num_steps, -1)

    @cached_property
    def busy(self) -> Seconds:
        """(S, W): seconds that each device computes."""
        return self.sums(self.local + self.sharded)

    @cached_property
    def cell_seconds(self) -> Seconds:
        """(C,): until the last rank of each micro-batch is done."""
        return np.maximum.reduceat(self.ranks, self.schedule.row_starts)

    @cached_property
    def cell_starts(self) -> Seconds:
        """(C,): seconds from the step's beginning at which all devices of each micro-batch are free."""
        return self._played[0]

    @cached_property
    def device_seconds(self) -> Seconds:
        """(S, W): until each device is done with its micro-batches."""
        return self._played[1]

    @cached_property
    def _played(self) -> tuple[Seconds, Seconds]:
        plan = self.schedule
        free = np.zeros((plan.num_steps, plan.num_devices))
        starts = np.zeros(plan.num_cells)
        of_rows = plan.rounds[plan.row_cells]
        for number in range(int(plan.rounds.max(initial=-1)) + 1):
            if self.in_step:
                free[:] = free.max(axis=1, keepdims=True)
            rows = np.flatnonzero(of_rows == number)
            np.maximum.at(starts, plan.row_cells[rows], free.reshape(-1)[plan.row_keys[rows]])
            done = starts + self.cell_seconds
            free.reshape(-1)[plan.row_keys[rows]] = done[plan.row_cells[rows]]
        return starts, free

    @cached_property
    def step_seconds(self) -> Seconds:
        """Seconds of each step, (S,): the slowest device, and the synchronisation."""
        return np.asarray(self.device_seconds.max(axis=1) + self.synchronisation)

    @cached_property
    def waited(self) -> Seconds:
        """(S,): seconds of exchanges in the open, on the ranks that the device which is done last waits for."""
        plan = self.schedule
        # The last row of each micro-batch in this order is that of its slowest rank.
        slowest = np.lexsort((self.ranks, plan.row_cells))[plan.row_starts + plan.cell_ranks - 1]
        exposed = self.sums(self.exposed[slowest][plan.row_cells])
        last = self.device_seconds.argmax(axis=1)
        return np.asarray(exposed[np.arange(plan.num_steps), last] + self.synchronisation)


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
        way: how ranks exchange what they share, see ``exchanges_of``.
        zero_stage: 3 shards the weights, too.
    """

    sizes: ModelSizes
    hardware: Hardware
    world_size: int
    constants: Constants = Constants()
    recompute: bool = False
    way: SequenceParallelType = "auto"
    zero_stage: int = 2

    def time(self, schedule: SimulatedSchedule, targets: Int64Array) -> Timing:
        """Times and memory of every micro-batch on every rank.

        Args:
            targets: int64 (K,), of the schedule's sequences: tokens with a label.
        """
        local = schedule.places != SHARDED
        num_ranks = schedule.cell_ranks[schedule.row_cells].astype(np.float64)
        row = schedule.row_starts[schedule.cells] + np.where(local, schedule.places, 0)
        sequence_parallel_sizes = schedule.cell_ranks[schedule.cells]

        def own(values: npt.NDArray[Any]) -> Seconds:
            return _sums(row[local], values[local], len(num_ranks))

        def shared(values: npt.NDArray[Any]) -> Seconds:
            return _sums(schedule.cells[~local], values[~local], schedule.num_cells)[schedule.row_cells]

        own_tokens, sharded_tokens = own(schedule.tokens), shared(schedule.tokens)
        tokens = own_tokens + sharded_tokens / num_ranks
        linear = self.linear_seconds(tokens, own(targets) + shared(targets) / num_ranks)
        linear = np.divide(linear, tokens, out=np.zeros_like(tokens), where=tokens > 0)
        own_attention = own(self.attention_seconds(schedule.tokens, 1))
        shard_attention = shared(self.attention_seconds(schedule.tokens, sequence_parallel_sizes))
        windows = self.window_seconds(schedule.tokens)
        local_seconds = linear * own_tokens + own_attention + own(windows)
        sharded_seconds = linear * sharded_tokens / num_ranks + shard_attention + shared(windows) / num_ranks
        exposed = np.zeros(len(tokens))
        for size in np.unique(schedule.cell_ranks).tolist():
            some = num_ranks == size
            times = self.step_time(size)
            exposed[some] = times.waited(sharded_tokens[some], own_attention[some], shard_attention[some])
        least = max(self.launch_seconds, self.gather_seconds)
        ranks = np.where(tokens > 0, np.maximum(local_seconds + sharded_seconds + exposed, least), 0.0)
        gathered = np.where(num_ranks > 1, sharded_tokens * self.sizes.kv_bytes * _GATHERED, 0.0)
        return Timing(
            schedule=schedule,
            local=local_seconds,
            sharded=sharded_seconds,
            exposed=exposed,
            ranks=ranks,
            memory=self.memory_bytes(tokens) + gathered,
            tokens=tokens,
            synchronisation=self.synchronisation_seconds,
            in_step=self.zero_stage == 3,
        )

    @property
    def synchronisation_seconds(self) -> float:
        """Gradients to their owners, and weights back, which ZeRO-3 gathers ahead of each layer instead."""
        once = self.hardware.collective_seconds(self.sizes.weight_bytes, self.world_size)
        return once if self.zero_stage == 3 else 2 * once

    @property
    def gather_seconds(self) -> float:
        """ZeRO-3: the weights of all layers gathered, forward and backward, in every micro-batch."""
        if self.zero_stage != 3:
            return 0.0
        layer = self.sizes.weight_bytes / self.sizes.num_layers
        return 2 * self.sizes.num_layers * self.hardware.collective_seconds(layer, self.world_size)

    @property
    def passes(self) -> float:
        """Matrix products in units of one forward and backward pass."""
        return 4 / 3 if self.recompute else 1.0

    @property
    def attention_passes(self) -> float:
        """Attention in units of one forward and backward pass, the latter two and a half times the former."""
        return 4.5 / 3.5 if self.recompute else 1.0

    def linear_seconds(self, tokens: npt.NDArray[Any], targets: npt.NDArray[Any]) -> Seconds:
        """Seconds of the matrix products on so many tokens, so many of them targets, of any shape; 0 for none."""
        cost, speed = self.sizes.cost, self.hardware.peak * self.hardware.matmul_share / self.passes
        flops = (tokens + self.constants.matmul_half_tokens) * cost.per_token + targets * cost.per_target_token
        return np.where(tokens > 0, flops / speed, 0.0)

    def window_seconds(self, lengths: npt.NDArray[Any]) -> Seconds:
        """Seconds of each sequence's attention in sliding layers on one rank, (K,): at the speed of matrix products."""
        speed = self.hardware.peak * self.hardware.matmul_share / self.attention_passes
        return np.asarray(self.sizes.cost.seen_in_windows(lengths) * (self.sizes.cost.per_window / speed))

    def attention_seconds(self, lengths: npt.NDArray[Any], num_ranks: npt.NDArray[Any] | int) -> Seconds:
        """Seconds of each sequence's attention, (K,), on one of the ranks that share it; lengths in tokens."""
        speed = self.hardware.peak * self.hardware.attention_share
        queries = np.asarray(lengths, dtype=np.float64)
        work = queries * (queries / num_ranks + self.constants.attention_half_tokens)
        return work * (self.attention_passes * self.sizes.cost.per_square / speed)

    def step_time(self, num_ranks: int) -> StepTime:
        """What Skrull's planner is told of this machine: the same links, speeds and launches."""
        hardware, square = self.hardware, self.sizes.cost.per_square
        speed = hardware.peak * hardware.matmul_share / self.passes
        slower = speed / (hardware.peak * hardware.attention_share / self.attention_passes)
        return StepTime(
            flops_per_second=speed,
            exchanges=exchanges_of(self.way, self.sizes, hardware, num_ranks, recompute=self.recompute),
            attention_flops=square,
            square_flops=square * (slower - 1),
            query_flops=square * slower * self.constants.attention_half_tokens,
            batch_flops=self.constants.matmul_half_tokens * self.sizes.cost.per_token,
            launch_seconds=self.launch_seconds,
            device=hardware.name,
        )

    @property
    def launch_seconds(self) -> float:
        """Time that the CPU needs to launch a micro-batch, however small it is."""
        constants = self.constants
        return self.sizes.num_layers * constants.kernels_per_layer * constants.launch_us * 1e-6 * self.passes

    def memory_bytes(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Bytes of weights, gradients, optimizer states and the activations of so many tokens, of any shape."""
        per_token = self.sizes.token_bytes(recompute=self.recompute)
        return np.asarray(self.state_bytes + tokens * per_token)

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer states on a device."""
        return self.sizes.state_bytes(self.world_size, self.zero_stage)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device's memory that training can fill."""
        return self.hardware.memory_gb * 1e9 * self.constants.usable_memory

    def largest_bucket(self, sequence_parallel_size: int) -> int:
        """Tokens that fit on a device, with keys and values of a layer gathered from all that share; below 1 if none.

        In whole thousands where there are as many.
        """
        left = self.usable_bytes - self.state_bytes
        gathered = self.sizes.kv_bytes * _GATHERED * sequence_parallel_size if sequence_parallel_size > 1 else 0
        tokens = int(left // (self.sizes.token_bytes(recompute=self.recompute) + gathered))
        return tokens // 1000 * 1000 if tokens >= 1000 else tokens


_BACKWARD = 2.5  # of attention, in units of its forward pass


def can_share_heads(sizes: ModelSizes, num_ranks: int) -> bool:
    """Whether Ulysses can share a model's heads among so many ranks."""
    return sizes.num_heads % math.lcm(sizes.num_key_heads, num_ranks) == 0


def exchanges_of(
    way: SequenceParallelType, sizes: ModelSizes, hardware: Hardware, num_ranks: int, *, recompute: bool
) -> tuple[Exchange, ...]:
    """What the ranks that share a sequence send each other in a micro-batch, and which attention runs meanwhile.

    It follows ``attention/parallel``, layer by layer and pass by pass. P ranks share V tokens; *own* is the first P-th
    of a rank's attention to them, that to its own keys.

    - all-gather: forward, K and V gathered behind local attention and own; backward the same, and 32-bit gradients of
      K and V summed in the open.
    - ring: forward, a hop of K and V behind local attention and own, each further one behind a P-th; backward the same,
      gradients in 32 bits beside each from the second block on, and one more hop of theirs in the open.
    - Ulysses: forward, Q, K and V behind local attention, the output in the open; backward, the output's gradient
      behind local attention, gradients of Q, K and V in the open.

    With recomputation a micro-batch goes forward twice. Where Ulysses has more ranks than there are heads of K and V,
    these are repeated.

    Args:
        way: how K and V, or heads, travel. ``auto`` is Ulysses within a node and all-gather beyond; all-gather it is
            also where Ulysses cannot share the heads.
        sizes: of the model.
        hardware: whose links they travel on.
        num_ranks: P; none for one.
        recompute: forward runs twice.
    """
    if num_ranks == 1:
        return ()
    forward, backward = _attention_shares(recompute)
    build = {"allgather": _all_gather, "ring": _ring, "ulysses": _ulysses}[way_of(way, sizes, hardware, num_ranks)]
    return build(sizes, hardware, num_ranks, 1 + recompute, forward, backward)


def way_of(
    way: SequenceParallelType, sizes: ModelSizes, hardware: Hardware, num_ranks: int
) -> Literal["allgather", "ring", "ulysses"]:
    """The way that is gone where so many ranks share a sequence, args as for ``exchanges_of``."""
    if way in ("ring", "allgather"):
        return way
    is_near = way == "ulysses" or num_ranks <= hardware.gpus_per_node
    return "ulysses" if is_near and can_share_heads(sizes, num_ranks) else "allgather"


def _attention_shares(recompute: bool) -> tuple[float, float]:
    """Shares of a micro-batch's attention that run forward, in all passes, and backward."""
    forward = 1.0 + recompute
    return forward / (forward + _BACKWARD), _BACKWARD / (forward + _BACKWARD)


def _all_gather(
    sizes: ModelSizes, hardware: Hardware, num_ranks: int, num_forward: int, forward: float, backward: float
) -> tuple[Exchange, ...]:
    layers, fixed = sizes.num_layers, hardware.fixed_seconds(num_ranks)
    gathered = sizes.kv_bytes / hardware.bytes_per_second(num_ranks)
    # The sum is an all-to-all of what every rank has for the others (``attention.parallel.exchange.sum_to_owners``).
    summed = 2 * sizes.kv_bytes / hardware.all_to_all_bytes_per_second(num_ranks)
    return (
        Exchange(num_forward * layers, fixed, gathered, forward, forward / num_ranks),
        Exchange(layers, fixed, gathered, backward, backward / num_ranks),
        Exchange(layers, fixed, summed),
    )


def _ring(
    sizes: ModelSizes, hardware: Hardware, num_ranks: int, num_forward: int, forward: float, backward: float
) -> tuple[Exchange, ...]:
    layers, fixed, further = sizes.num_layers, hardware.fixed_seconds(num_ranks), num_ranks - 2
    hop = sizes.kv_bytes / num_ranks / hardware.hop_bytes_per_second(num_ranks)
    block = backward / num_ranks
    return (
        Exchange(num_forward * layers, fixed, hop, forward, forward / num_ranks),
        Exchange(num_forward * layers * further, fixed, hop, 0.0, forward / num_ranks * further),
        Exchange(layers, fixed, hop, backward, block),
        # K and V of the next block, and gradients of the last one, one after the other.
        Exchange(layers * further, 2 * fixed, 3 * hop, 0.0, block * further),
        Exchange(layers, fixed, 2 * hop, 0.0, block),
        Exchange(layers, fixed, 2 * hop),
    )


def _ulysses(
    sizes: ModelSizes, hardware: Hardware, num_ranks: int, num_forward: int, forward: float, backward: float
) -> tuple[Exchange, ...]:
    layers, fixed = sizes.num_layers, hardware.fixed_seconds(num_ranks)
    copies = math.lcm(sizes.num_key_heads, num_ranks) // sizes.num_key_heads
    per_byte = 1 / num_ranks / hardware.all_to_all_bytes_per_second(num_ranks)
    output, inputs = sizes.query_bytes * per_byte, (sizes.query_bytes + copies * sizes.kv_bytes) * per_byte
    return (
        Exchange(num_forward * layers, fixed, inputs, forward),
        Exchange(num_forward * layers, fixed, output),
        Exchange(layers, fixed, output, backward),
        Exchange(layers, fixed, inputs),
    )
