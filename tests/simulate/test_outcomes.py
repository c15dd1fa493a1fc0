"""The cost model keeps to its formulas, and schedules hold what the planners decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from packtool.config.simulate import STRATEGIES, StrategyName
from packtool.errors import DataError
from packtool.plan.skrull import SHARDED
from packtool.simulate.cost import Constants, Machine, SimulatedSchedule
from packtool.simulate.distributions import draw_lengths
from packtool.simulate.hardware import HARDWARE_PRESETS, Hardware
from packtool.simulate.model_sizes import MODEL_PRESETS, ModelSizes
from packtool.simulate.outcomes import Outcome, arrange, simulate
from packtool.simulate.strategies import TITLES, SimulateOptions, schedule

SIZES = ModelSizes.of_config(MODEL_PRESETS["qwen2.5-0.5b"])
NO_LAUNCHES = Constants(launch_us=0)


def machine(world_size: int = 32, constants: Constants = NO_LAUNCHES, **hardware: Any) -> Machine:
    changed: Hardware = replace(HARDWARE_PRESETS["h100"], **hardware)
    return Machine(sizes=SIZES, hardware=changed, world_size=world_size, constants=constants)


def options(of: Machine | None = None, **changes: Any) -> SimulateOptions:
    settings: dict[str, Any] = {
        "sequence_parallel_size": 8,
        "bucket_size": 26_000,
        "packing_length": 26_000,
        "num_steps": 3,
    }
    return SimulateOptions(machine=of or machine(), **{**settings, **changes})


def lengths_for(chosen: SimulateOptions, name: Any = "wikipedia") -> Any:
    return arrange(draw_lengths(name, 12_000, seed=0), chosen)[0]


def outcomes(chosen: SimulateOptions, data: Any = "wikipedia") -> dict[StrategyName, Outcome]:
    return {found.name: found for found in simulate(lengths_for(chosen, data), STRATEGIES, chosen)}


def one_sequence(tokens: int, sequence_parallel_size: int = 1) -> SimulatedSchedule:
    zero = np.zeros(1, dtype=np.int64)
    place = np.array([SHARDED if sequence_parallel_size > 1 else 0])
    return SimulatedSchedule(sequence_parallel_size, 1, 1, zero, np.array([tokens]), place, zero, zero, zero)


def test_one_rank_and_one_sequence() -> None:
    """The formulas of the module, written out."""
    timing = machine(1).time(one_sequence(1000))
    flops = SIZES.cost.per_token + SIZES.cost.per_target_token
    expected = (1000 + 300) * flops / (989e12 * 0.8) + 1000 * (1000 + 512) * SIZES.cost.per_square / (989e12 * 0.35)
    assert timing.step_seconds[0] == pytest.approx(expected)
    assert timing.memory[0, 0] == SIZES.state_bytes(1) + 1000 * SIZES.token_bytes(recompute=False)


def test_one_sharded_sequence() -> None:
    found = machine(8)
    timing = found.time(one_sequence(8000, 8))
    flops = SIZES.cost.per_token + SIZES.cost.per_target_token
    expected = (1000 + 300) * flops / (989e12 * 0.8) + 8000 * (1000 + 512) * SIZES.cost.per_square / (989e12 * 0.35)
    gathers = 3 * 24 * found.hardware.collective_seconds(8000 * SIZES.kv_bytes, 8)
    assert timing.ranks[0] == pytest.approx(np.full(8, expected + gathers))
    assert timing.step_seconds[0] == pytest.approx(expected + gathers + timing.synchronisation)
    assert timing.waited[0] == pytest.approx(gathers + timing.synchronisation)


@pytest.mark.parametrize("recompute", [False, True])
def test_skrulls_planner_is_told_what_the_simulation_knows(recompute: bool) -> None:
    found = replace(machine(8), recompute=recompute)
    times, tokens = found.step_time(8), np.array([300, 5000])
    flops = SIZES.cost(tokens, tokens**2, tokens)
    linear = found.linear_seconds(tokens) * tokens / (tokens + found.constants.matmul_half_tokens)
    local = times.work(tokens, flops) / times.flops_per_second
    assert local == pytest.approx(linear + found.attention_seconds(tokens, 1))
    sharded = times.work(tokens, flops, 8) / 8 / times.flops_per_second
    assert sharded == pytest.approx(linear / 8 + found.attention_seconds(tokens, 8))
    assert times.launch_seconds == found.launch_seconds


def test_a_gpu_is_never_faster_than_its_launches() -> None:
    found = machine(1, Constants(launch_us=5))
    assert found.launch_seconds == pytest.approx(24 * 150 * 5e-6)
    timing = found.time(one_sequence(10))
    assert timing.step_seconds[0] == found.launch_seconds
    assert timing.launching[0, 0] == pytest.approx(found.launch_seconds - timing.local[0, 0])


def test_recomputation_costs_a_forward_pass_and_saves_memory() -> None:
    plain = machine(1)
    again = replace(plain, recompute=True)
    tokens = np.array([5000])
    # Backward is twice forward in matrix products, and two and a half times in attention.
    assert again.linear_seconds(tokens) == pytest.approx(plain.linear_seconds(tokens) * 4 / 3)
    assert again.attention_seconds(tokens, 1) == pytest.approx(plain.attention_seconds(tokens, 1) * 4.5 / 3.5)
    (seconds,), (more,) = (one.time(one_sequence(5000)).step_seconds for one in (plain, again))
    assert more == pytest.approx(float(again.linear_seconds(tokens)[0] + again.attention_seconds(tokens, 1)[0]))
    assert more > seconds
    assert plain.largest_bucket(1) > plain.largest_bucket(64)
    assert again.largest_bucket(1) > plain.largest_bucket(1) > 10_000


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_sequence_once(name: StrategyName) -> None:
    chosen = options()
    lengths = lengths_for(chosen)
    found = schedule(name, lengths, chosen)
    assert len(np.unique(found.samples)) == len(found.samples)
    assert (found.tokens >= lengths[found.samples]).all()
    assert (np.diff(found.cells) >= 0).all()
    assert found.cells.max() < found.num_cells == len(found.cell_groups)
    assert found.num_groups * found.sequence_parallel_size == 32
    if name in ("padded", "context-parallel", "sorted", "skrull"):
        assert sorted(found.samples.tolist()) == list(range(3 * 256))
        per_step = np.bincount(found.cell_steps[found.cells])
        assert per_step.tolist() == [256, 256, 256]
    if name in ("context-parallel", "padded", "skrull"):
        # The order of the optimizer's steps is nobody's to change.
        assert (found.samples // 256 == found.cell_steps[found.cells]).all()


@pytest.mark.parametrize("data", ["wikipedia", "lmsys", "chatqa2"])
def test_times_keep_their_bounds(data: str) -> None:
    for found in outcomes(options(), data).values():
        timing = found.timing
        bound = found.flops / 32 / found.options.machine.hardware.peak
        assert timing.step_seconds.sum() > bound
        assert (timing.ranks >= timing.local + timing.sharded - 1e-12).all()
        shares = timing.shares
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) >= 0
        figures = found.figures(found)
        assert figures["speedup"] == 1
        assert 0 < figures["mfu"] < 0.8
        assert figures["balance"] >= 1
        assert 0 <= figures["communication_share"] < 1


def test_twice_the_peak_is_half_the_computing() -> None:
    slow, fast = (outcomes(options(machine(peak_tflops=peak))) for peak in (500, 1000))
    for name in ("padded", "packed", "context-parallel"):
        assert slow[name].timing.busy == pytest.approx(2 * fast[name].timing.busy)


def test_links_without_limits_cost_nothing() -> None:
    free = machine(intra_node_gb_per_s=1e18, inter_node_gb_per_s=1e18, latency_us=0)
    for found in outcomes(options(free)).values():
        assert found.figures(found)["communication_share"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("data", ["wikipedia", "lmsys", "chatqa2"])
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-7b"])
def test_skrull_is_not_slower_than_sharding_everything(data: str, model: str) -> None:
    of = Machine(
        sizes=ModelSizes.of_config(MODEL_PRESETS[model]),
        hardware=HARDWARE_PRESETS["h100"],
        world_size=32,
        recompute=True,
    )
    chosen = options(of, bucket_size=13_000, packing_length=13_000)
    lengths = lengths_for(chosen, data)
    shared, skrull = simulate(lengths, ["context-parallel", "skrull"], chosen)
    assert (skrull.timing.step_seconds <= shared.timing.step_seconds).all()
    assert not skrull.out_of_memory.any()


def test_a_sequence_that_no_gpu_holds_is_out_of_memory_where_it_is_not_shared() -> None:
    chosen = options(num_steps=1)
    lengths = np.full(256, 500, dtype=np.int32)
    lengths[7] = 78_000
    found = {one.name: one for one in simulate(lengths, STRATEGIES, chosen)}
    for name, one in found.items():
        assert one.out_of_memory.tolist() == [name in ("padded", "packed", "packed-balanced")], name
    assert found["padded"].figures(found["skrull"])["out_of_memory_steps"] == 1


def test_what_no_group_holds_is_left_out() -> None:
    chosen = options(bucket_size=1000, packing_length=1000)
    kept, num_left_out = arrange(np.array([10, 8000, 8001, 10**6]), chosen)
    assert sorted(kept.tolist()) == [10, 8000]
    assert num_left_out == 2
    with pytest.raises(DataError, match="none has at most 8,000"):
        arrange(np.array([9000]), chosen)
    with pytest.raises(DataError, match="no tokens"):
        arrange(np.array([0, 5]), chosen)


def test_fewer_sequences_than_a_step() -> None:
    for found in simulate(np.arange(1, 6, dtype=np.int32), STRATEGIES, options()):
        assert found.num_steps == 1
        assert found.num_sequences == 5


def test_alone_and_together() -> None:
    """Groups of one GPU: nothing is shared, and nothing breaks."""
    for found in simulate(lengths_for(options()), STRATEGIES, options(sequence_parallel_size=1, sequences_per_rank=8)):
        assert found.timing.schedule.sequence_parallel_size == 1
        assert found.timing.communication.sum() == 0
        assert found.title == TITLES[found.name]
