"""Estimated step times: a cost model of compute, communication, launching and memory, for any schedule.

N ranks share a micro-batch; each sequence is local to one of them or sharded over all. For rank j of a micro-batch

    linear(n)    = ((n + n0) * f + targets * h) / (peak * matmul share)      n tokens on the rank, local ones and shards
                   and attention in sliding layers, by the tokens that their windows cover
    local(j)     = its part of linear + sum of s (s + a0) * g / (peak * attention share)         local sequences
    sharded      = its part of linear + sum of s (s / N + a0) * g / (peak * attention share)     sharded sequences
    exposed(j)   = exchanges of keys, values and gradients that its attention does not hide (``exchanges_of``)
    time(j)      = max(launches, local(j) + sharded + exposed(j))
    micro-batch  = max over j of time(j)
    step         = time of the slowest device + gradients out + weights back

with f FLOPs of a token, h of a target and g of a unit of s^2 (``planning.cost``), all for forward and backward, and
once more forward with recomputation.

Left out: towers of images and sounds, the optimizer's own time, loading, stragglers, congestion, and padding inside
kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.config.packing import SequenceParallelType
from packtool.planning.cost import Exchange, ModelSizes, StepTime
from packtool.planning.pack_plan import Int64Array
from packtool.planning.skrull import SHARDED
from packtool.simulate.hardware import Hardware

Seconds = npt.NDArray[np.float64]

_GATHERED_COPIES = 4
"""Memory of all-gather for each token of the group in a layer, in units of ``kv_bytes``: K and V, a copy of the visible
ones, and gradients of 32 bits. The other ways need less, and are charged as much."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Assumptions about software, for any hardware.

    Args:
        matmul_half_tokens: n0, tokens on a rank at which matrix products reach half of their best speed. Reading 2-byte
            weights takes as long as 2 FLOPs a weight and token at peak / bandwidth = 295 tokens on an H100.
        attention_half_tokens: a0, the same for the queries of one sequence: the curves of FlashAttention-2 (Dao 2023,
            figures 4 to 6) are about half as high at 512 tokens as at 16K.
        kernels_per_layer: launched in forward and backward, counted with torch's profiler on Qwen2.
        launch_us: microseconds that one launch takes the CPU: a GPU is never faster than its launches.
        usable_memory: share of the memory left by allocator, CUDA and NCCL.
    """

    matmul_half_tokens: float = 300.0
    attention_half_tokens: float = 512.0
    kernels_per_layer: int = 150
    launch_us: float = 5.0
    usable_memory: float = 0.92


@dataclass(frozen=True, eq=False)
class SimulatedSchedule:
    """K sequences in C micro-batches of S steps on W devices: the result of every strategy.

    Micro-batches that share devices run in this order, and the devices of the later one are among those of the earlier,
    so that all of them begin it together. A *row* is one device's part of a micro-batch; there are R, micro-batch by
    micro-batch.

    Args:
        num_devices, num_steps: W and S.
        samples: int64 (K,), numbers of the sequences.
        tokens: int64 (K,), of each sequence, with padding.
        placement: int64 (K,), the rank of its micro-batch that each sequence is local to, or ``SHARDED``.
        micro_batch_of: int64 (K,), the micro-batch of each sequence, ascending.
        micro_batch_steps: int64 (C,), step of each micro-batch, ascending.
        micro_batch_num_devices: int64 (C,), devices that share each micro-batch, N.
        micro_batch_first_device: int64 (C,), the first of these; the others follow it.
    """

    num_devices: int
    num_steps: int
    samples: Int64Array
    tokens: Int64Array
    placement: Int64Array
    micro_batch_of: Int64Array
    micro_batch_steps: Int64Array
    micro_batch_num_devices: Int64Array
    micro_batch_first_device: Int64Array

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batch_steps)

    @property
    def sequence_num_devices(self) -> Int64Array:
        """int64 (K,): devices that share the micro-batch of each sequence."""
        return self.micro_batch_num_devices[self.micro_batch_of]

    @cached_property
    def row_starts(self) -> Int64Array:
        """int64 (C,): the first row of each micro-batch."""
        return np.cumsum(self.micro_batch_num_devices) - self.micro_batch_num_devices

    @cached_property
    def row_micro_batches(self) -> Int64Array:
        """int64 (R,): the micro-batch of each row."""
        return np.repeat(np.arange(self.num_micro_batches), self.micro_batch_num_devices)

    @cached_property
    def row_keys(self) -> Int64Array:
        """int64 (R,): step * W + device of each row."""
        batches = self.row_micro_batches
        rank_in_batch = np.arange(len(batches)) - self.row_starts[batches]
        devices = self.micro_batch_first_device[batches] + rank_in_batch
        return self.micro_batch_steps[batches] * self.num_devices + devices

    @cached_property
    def row_num_devices(self) -> Seconds:
        """float64 (R,): devices that share the micro-batch of each row."""
        return self.micro_batch_num_devices[self.row_micro_batches].astype(np.float64)

    def sum_local(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sum values (K,) of the sequences local to each row's device; (R,)."""
        is_local = self.placement != SHARDED
        first_rows = self.row_starts[self.micro_batch_of[is_local]]
        rows = first_rows + self.placement[is_local]
        return _sums(rows, values[is_local], len(self.row_micro_batches))

    def sum_sharded(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sum values (K,) of all sharded sequences of each row's micro-batch; (R,)."""
        is_sharded = self.placement == SHARDED
        micro_batch_sums = _sums(self.micro_batch_of[is_sharded], values[is_sharded], self.num_micro_batches)
        return micro_batch_sums[self.row_micro_batches]

    def sum_by_row(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Sum values (K,) of the local sequences and of the device's equal share of the sharded ones; (R,)."""
        return self.sum_local(values) + self.sum_sharded(values) / self.row_num_devices

    @cached_property
    def rounds(self) -> Int64Array:
        """int64 (C,): micro-batches that the busiest of its devices has before it in its step."""
        order = np.argsort(self.row_keys, kind="stable")
        keys = self.row_keys[order]
        num_before = np.empty(len(keys), np.int64)
        num_before[order] = np.arange(len(keys)) - np.searchsorted(keys, keys)
        return np.maximum.reduceat(num_before, self.row_starts)


@dataclass(frozen=True, eq=False)
class Timing:
    """Times of a schedule, by its R rows.

    Args:
        local, sharded: (R,), seconds of the sequences local to each rank, and of the shards.
        exposed: (R,), seconds of exchanges that no attention hides.
        row_seconds: (R,), seconds until each rank is done.
        memory, tokens: (R,), bytes and tokens on each rank.
        recomputed: (R,), share of the layers, 0 to 1, that recompute their activations.
        synchronisation: seconds of gradients and weights, once a step.
        is_lock_step: all devices begin each of their micro-batches together.
    """

    schedule: SimulatedSchedule
    local: Seconds
    sharded: Seconds
    exposed: Seconds
    row_seconds: Seconds
    memory: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    recomputed: npt.NDArray[np.float64]
    synchronisation: float
    is_lock_step: bool = False

    @cached_property
    def launching(self) -> Seconds:
        """(R,): idle seconds because kernels are not launched or weights not gathered."""
        return np.maximum(self.row_seconds - self.local - self.sharded - self.exposed, 0.0)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Share of the devices' time by activity, over all steps; the shares add up to 1."""
        total = float(self.step_seconds.sum()) * self.schedule.num_devices
        seconds = {
            "local": float(self.local.sum()),
            "sharded": float(self.sharded.sum()),
            "communication": float(self.exposed.sum()),
            "launching": float(self.launching.sum()),
            "synchronisation": total / float(self.step_seconds.mean()) * self.synchronisation,
        }
        shares = {name: value / total for name, value in seconds.items()}
        return {**shares, "waiting": max(1 - sum(shares.values()), 0.0)}

    def sums(self, per_row: npt.NDArray[Any]) -> Seconds:
        """Sum values (R,) of rows by step and device, (S, W)."""
        plan = self.schedule
        return _sums(plan.row_keys, per_row, plan.num_steps * plan.num_devices).reshape(plan.num_steps, -1)

    @cached_property
    def busy_seconds(self) -> Seconds:
        """(S, W): seconds that each device computes."""
        return self.sums(self.local + self.sharded)

    @property
    def num_micro_batches(self) -> Seconds:
        """(S, W): micro-batches of each device."""
        return self.sums(np.ones(len(self.row_seconds)))

    @cached_property
    def micro_batch_seconds(self) -> Seconds:
        """(C,): until the last rank of each micro-batch is done."""
        return np.maximum.reduceat(self.row_seconds, self.schedule.row_starts)

    @cached_property
    def micro_batch_starts(self) -> Seconds:
        """(C,): seconds from the step's beginning at which all devices of each micro-batch are free."""
        return self._starts_and_ends[0]

    @cached_property
    def device_seconds(self) -> Seconds:
        """(S, W): until each device is done with its micro-batches."""
        return self._starts_and_ends[1]

    @cached_property
    def _starts_and_ends(self) -> tuple[Seconds, Seconds]:
        plan = self.schedule
        free = np.zeros((plan.num_steps, plan.num_devices))
        starts = np.zeros(plan.num_micro_batches)
        row_rounds = plan.rounds[plan.row_micro_batches]
        for number in range(int(plan.rounds.max(initial=-1)) + 1):
            if self.is_lock_step:
                free[:] = free.max(axis=1, keepdims=True)
            rows = np.flatnonzero(row_rounds == number)
            np.maximum.at(starts, plan.row_micro_batches[rows], free.reshape(-1)[plan.row_keys[rows]])
            free.reshape(-1)[plan.row_keys[rows]] = (starts + self.micro_batch_seconds)[plan.row_micro_batches[rows]]
        return starts, free

    @cached_property
    def step_seconds(self) -> Seconds:
        """(S,): seconds of each step: the slowest device, and the synchronisation."""
        return np.asarray(self.device_seconds.max(axis=1) + self.synchronisation)

    @cached_property
    def communication_seconds(self) -> Seconds:
        """(S,): seconds of exposed exchanges on the ranks that the slowest device waits for."""
        plan = self.schedule
        # The last row of each micro-batch in this order is that of its slowest rank.
        last_rows = plan.row_starts + plan.micro_batch_num_devices - 1
        slowest = np.lexsort((self.row_seconds, plan.row_micro_batches))[last_rows]
        exposed = self.sums(self.exposed[slowest][plan.row_micro_batches])
        last = self.device_seconds.argmax(axis=1)
        return np.asarray(exposed[np.arange(plan.num_steps), last] + self.synchronisation)


def _sums(keys: Int64Array, values: npt.NDArray[Any], num: int) -> Seconds:
    return np.asarray(np.bincount(keys, values, num), dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model on devices, by which schedules are timed.

    Gradients and optimizer are sharded over ``world_size`` devices, with ``zero_stage`` 3 the weights, too. With
    ``recompute`` "auto", each micro-batch recomputes as few layers as its memory allows; schedules are planned with the
    speed of no recomputation, and buckets with the memory of full recomputation.
    """

    sizes: ModelSizes
    hardware: Hardware
    world_size: int
    constants: Constants = Constants()
    recompute: bool | Literal["auto"] = False
    sequence_parallel_type: SequenceParallelType = "auto"
    zero_stage: int = 2

    def time(self, schedule: SimulatedSchedule, targets: Int64Array) -> Timing:
        """Compute times and memory of a schedule: of each row, which is one device's part of a micro-batch.

        ``targets``: number of labels of each sequence of the schedule, (K,).
        """
        if self.recompute == "auto":
            return self._time_with_necessary_layers(schedule, targets)
        row_tokens = schedule.sum_by_row(schedule.tokens)
        local, sharded, exposed = self._computing_seconds(schedule, targets)
        # While a device computes, the CPU launches kernels, and ZeRO-3 gathers weights.
        min_seconds = max(self.launch_seconds, self.gather_seconds)
        seconds = np.maximum(local + sharded + exposed, min_seconds)
        has_tokens = row_tokens > 0
        recomputed_share = 1.0 if self.recompute else 0.0
        return Timing(
            schedule=schedule,
            local=local,
            sharded=sharded,
            exposed=exposed,
            row_seconds=np.where(has_tokens, seconds, 0.0),
            memory=self._row_bytes(schedule, row_tokens),
            tokens=row_tokens,
            recomputed=np.full(len(row_tokens), recomputed_share),
            synchronisation=self.synchronisation_seconds,
            is_lock_step=self.zero_stage == 3,  # all devices gather each layer's weights together
        )

    def _row_bytes(self, schedule: SimulatedSchedule, row_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Compute the peak memory of each row, (R,): states, activations, and keys and values of other devices."""
        activation_bytes = row_tokens * self.sizes.token_bytes(recompute=bool(self.recompute))
        gathered_bytes = schedule.sum_sharded(schedule.tokens) * self.sizes.kv_bytes * _GATHERED_COPIES
        is_shared = schedule.row_num_devices > 1
        return self.state_bytes + activation_bytes + np.where(is_shared, gathered_bytes, 0.0)

    def _computing_seconds(self, schedule: SimulatedSchedule, targets: Int64Array) -> tuple[Seconds, Seconds, Seconds]:
        """Estimate the seconds that each row computes and communicates; a row is one device's part of a micro-batch.

        A local sequence is computed by one device, a sharded one by all devices of its micro-batch.

        Returns:
            For each row, (R,): the seconds of its local sequences, those of its part of sharded ones, and those of
            exchanges between devices that attention does not hide.
        """
        tokens = schedule.tokens
        window_seconds = self._sliding_window_seconds(tokens)  # of each sequence, on one device
        linear_per_token = self._linear_seconds_per_token(schedule, targets)
        local_linear = linear_per_token * schedule.sum_local(tokens)
        local_attention = schedule.sum_local(self.attention_seconds(tokens, 1))
        local = local_linear + local_attention + schedule.sum_local(window_seconds)

        # ``attention_seconds`` are of one device; the other work on sharded sequences is divided by the devices here.
        num_devices = schedule.row_num_devices
        sharded_tokens = schedule.sum_sharded(tokens)
        sharded_linear = linear_per_token * sharded_tokens / num_devices
        sharded_attention = schedule.sum_sharded(self.attention_seconds(tokens, schedule.sequence_num_devices))
        sharded = sharded_linear + sharded_attention + schedule.sum_sharded(window_seconds) / num_devices
        exposed_exchanges = self._exposed_seconds(schedule, sharded_tokens, local_attention, sharded_attention)
        return local, sharded, exposed_exchanges

    def _linear_seconds_per_token(self, schedule: SimulatedSchedule, targets: Int64Array) -> Seconds:
        """Compute the mean seconds (R,) of a token's matrix products in each row; 0 in rows without tokens."""
        row_tokens = schedule.sum_by_row(schedule.tokens)
        seconds = self.linear_seconds(row_tokens, schedule.sum_by_row(targets))
        return seconds / np.where(row_tokens > 0, row_tokens, 1.0)

    def _time_with_necessary_layers(self, schedule: SimulatedSchedule, targets: Int64Array) -> Timing:
        """Time each row between the times without and with recomputation, by the share of layers that recompute."""
        without = replace(self, recompute=False).time(schedule, targets)
        with_all = replace(self, recompute=True).time(schedule, targets)
        saved_bytes = np.maximum(without.memory - with_all.memory, 1.0)
        necessary = np.clip((without.memory - self.usable_bytes) / saved_bytes, 0.0, 1.0)
        shares = np.ceil(necessary * self.sizes.num_layers) / self.sizes.num_layers
        names = ("local", "sharded", "exposed", "row_seconds", "memory", "recomputed")
        mixed = {name: (1 - shares) * getattr(without, name) + shares * getattr(with_all, name) for name in names}
        return replace(without, **mixed)

    def _sliding_window_seconds(self, tokens: Int64Array) -> Seconds:
        """Compute the seconds (K,) of attention in sliding windows, which runs at the speed of matrix products."""
        cost = self.sizes.cost
        speed = self.hardware.peak * self.hardware.matmul_share / self._attention_passes
        return np.asarray(cost.window_squares(tokens) * (cost.per_window / speed))

    def _exposed_seconds(
        self, schedule: SimulatedSchedule, sharded_tokens: Seconds, local_attention: Seconds, sharded_attention: Seconds
    ) -> Seconds:
        """Compute the seconds (R,) of exchanges that attention does not hide; the arguments are of rows, (R,)."""
        exposed = np.zeros(len(sharded_tokens))
        for size in np.unique(schedule.micro_batch_num_devices).tolist():
            rows = schedule.row_num_devices == size
            times = self.step_time(size)
            exposed[rows] = times.exposed_seconds(sharded_tokens[rows], local_attention[rows], sharded_attention[rows])
        return exposed

    @property
    def synchronisation_seconds(self) -> float:
        """Seconds to send gradients to their owners and weights back, the latter not with ZeRO-3."""
        once = self.hardware.collective_seconds(self.sizes.weight_bytes, self.world_size)
        return once if self.zero_stage == 3 else 2 * once

    @property
    def gather_seconds(self) -> float:
        """Seconds to gather the weights of all layers in a micro-batch, forward and backward; 0 without ZeRO-3."""
        if self.zero_stage != 3:
            return 0.0
        layer = self.sizes.weight_bytes / self.sizes.num_layers
        return 2 * self.sizes.num_layers * self.hardware.collective_seconds(layer, self.world_size)

    @property
    def _linear_speed(self) -> float:
        """FLOP/s of matrix products, of one forward and backward pass."""
        return self.hardware.peak * self.hardware.matmul_share / (4 / 3 if self.recompute is True else 1.0)

    @property
    def _attention_passes(self) -> float:
        """Attention in units of one forward and backward pass, the latter two and a half times the former."""
        return 4.5 / 3.5 if self.recompute is True else 1.0

    def linear_seconds(self, tokens: npt.NDArray[Any], targets: npt.NDArray[Any]) -> Seconds:
        """Compute the seconds of the matrix products on ``tokens``, with ``targets`` labels; of any shape."""
        cost = self.sizes.cost
        flops = (tokens + self.constants.matmul_half_tokens) * cost.per_token + targets * cost.per_target_token
        return np.where(tokens > 0, flops / self._linear_speed, 0.0)

    def attention_seconds(self, lengths: npt.NDArray[Any], num_ranks: npt.NDArray[Any] | int) -> Seconds:
        """Compute the seconds (K,) of the attention to each sequence on one of the ranks that share it."""
        speed = self.hardware.peak * self.hardware.attention_share
        queries = np.asarray(lengths, dtype=np.float64)
        work = queries * (queries / num_ranks + self.constants.attention_half_tokens)
        return work * (self._attention_passes * self.sizes.cost.per_square / speed)

    def step_time(self, num_ranks: int) -> StepTime:
        """Convert links, speeds and launches to the model that Skrull plans with."""
        hardware, square, speed = self.hardware, self.sizes.cost.per_square, self._linear_speed
        slower = speed / (hardware.peak * hardware.attention_share / self._attention_passes)
        recompute = self.recompute is True
        exchanges = exchanges_of(self.sequence_parallel_type, self.sizes, hardware, num_ranks, recompute=recompute)
        return StepTime(
            flops_per_second=speed,
            exchanges=exchanges,
            attention_flops=square,
            square_flops=square * (slower - 1),
            query_flops=square * slower * self.constants.attention_half_tokens,
            batch_flops=self.constants.matmul_half_tokens * self.sizes.cost.per_token,
            launch_seconds=self.launch_seconds,
            key_seconds=self.key_seconds,
            device=hardware.name,
        )

    @property
    def launch_seconds(self) -> float:
        """Seconds that the CPU needs to launch a micro-batch, however small it is."""
        constants, passes = self.constants, 4 / 3 if self.recompute is True else 1.0
        return self.sizes.num_layers * constants.kernels_per_layer * constants.launch_us * 1e-6 * passes

    @property
    def key_seconds(self) -> float:
        """Seconds to gather a token's keys and values in all layers, forward and backward (``GatherTokens``).

        Bytes that memory moves, in units of ``kv_bytes``: forward 2 to read and write; backward 2 to sort the
        gradients, 3 to convert them to 32 bits, and 2 to add them up.
        """
        moved = 7 + (4 if self.recompute is True else 2)
        return moved * self.sizes.num_layers * self.sizes.kv_bytes / (self.hardware.hbm_gb_per_s * 1e9)

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer states on a device."""
        return self.sizes.state_bytes(self.world_size, self.zero_stage)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device's memory that training can fill."""
        return self.hardware.memory_gb * 1e9 * self.constants.usable_memory

    def largest_bucket(self, sequence_parallel_size: int) -> int:
        """Compute the tokens that fit on a device besides gathered keys and values, in full thousands if any."""
        free = self.usable_bytes - self.state_bytes
        gathered = self.sizes.kv_bytes * _GATHERED_COPIES * sequence_parallel_size if sequence_parallel_size > 1 else 0
        tokens = int(free // (self.sizes.token_bytes(recompute=bool(self.recompute)) + gathered))
        return tokens // 1000 * 1000 if tokens >= 1000 else tokens


_BACKWARD = 2.5  # of attention, in units of its forward pass


def can_share_heads(sizes: ModelSizes, num_ranks: int) -> bool:
    """Return whether Ulysses can share a model's heads among ``num_ranks``."""
    return sizes.num_heads % math.lcm(sizes.num_key_heads, num_ranks) == 0


def exchanges_of(
    sequence_parallel_type: SequenceParallelType,
    sizes: ModelSizes,
    hardware: Hardware,
    num_ranks: int,
    *,
    recompute: bool,
) -> tuple[Exchange, ...]:
    """List the exchanges of a micro-batch among ranks that share a sequence, and the attention that hides them.

    They follow ``attention/parallel``, layer by layer and pass by pass. ``num_ranks`` is P; *own* is the first P-th of
    a rank's attention to the sharded tokens, that to its own keys.

    - all-gather: forward, K and V gathered behind local attention and own; backward the same, and 32-bit gradients of
      K and V summed in the open.
    - ring: forward, a hop of K and V behind local attention and own, each further one behind a P-th; backward the same,
      gradients in 32 bits beside each from the second block on, and one more hop of theirs in the open.
    - Ulysses: forward, Q, K and V behind local attention, the output in the open; backward, the output's gradient
      behind local attention, gradients of Q, K and V in the open. Heads of K and V are repeated for further ranks.
    """
    if num_ranks == 1:
        return ()
    exchange_type = exchange_type_of(sequence_parallel_type, sizes, hardware, num_ranks)
    layers, fixed, passes = sizes.num_layers, hardware.fixed_seconds(num_ranks), 1 + recompute
    # Shares of a micro-batch's attention that run forward, in all passes, and backward.
    forward, backward = passes / (passes + _BACKWARD), _BACKWARD / (passes + _BACKWARD)
    if exchange_type == "allgather":
        gathered = sizes.kv_bytes / hardware.bytes_per_second(num_ranks)
        # The sum is an all-to-all of what every rank has for the others (``attention.parallel.exchange``).
        summed = 2 * sizes.kv_bytes / hardware.bytes_per_second(num_ranks, all_to_all=True)
        return (
            Exchange(passes * layers, fixed, gathered, forward, forward / num_ranks),
            Exchange(layers, fixed, gathered, backward, backward / num_ranks),
            Exchange(layers, fixed, summed),
        )
    if exchange_type == "ring":
        hop = sizes.kv_bytes / num_ranks / hardware.hop_bytes_per_second(num_ranks)
        num_further, block = num_ranks - 2, backward / num_ranks
        return (
            Exchange(passes * layers, fixed, hop, forward, forward / num_ranks),
            Exchange(passes * layers * num_further, fixed, hop, 0.0, forward / num_ranks * num_further),
            Exchange(layers, fixed, hop, backward, block),
            # K and V of the next block, and gradients of the last one, one after the other.
            Exchange(layers * num_further, 2 * fixed, 3 * hop, 0.0, block * num_further),
            Exchange(layers, fixed, 2 * hop, 0.0, block),
            Exchange(layers, fixed, 2 * hop),
        )
    num_copies = math.lcm(sizes.num_key_heads, num_ranks) // sizes.num_key_heads
    per_byte = 1 / num_ranks / hardware.bytes_per_second(num_ranks, all_to_all=True)
    output, inputs = sizes.query_bytes * per_byte, (sizes.query_bytes + num_copies * sizes.kv_bytes) * per_byte
    return (
        Exchange(passes * layers, fixed, inputs, forward),
        Exchange(passes * layers, fixed, output),
        Exchange(layers, fixed, output, backward),
        Exchange(layers, fixed, inputs),
    )


def exchange_type_of(
    sequence_parallel_type: SequenceParallelType, sizes: ModelSizes, hardware: Hardware, num_ranks: int
) -> Literal["allgather", "ring", "ulysses"]:
    """Resolve ``auto``: Ulysses within a node, else all-gather. Ulysses needs heads that can be shared."""
    if sequence_parallel_type in ("ring", "allgather"):
        return sequence_parallel_type
    is_near = sequence_parallel_type == "ulysses" or num_ranks <= hardware.gpus_per_node
    return "ulysses" if is_near and can_share_heads(sizes, num_ranks) else "allgather"
