"""The cost model keeps to its formulas, and schedules hold what the planners decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.config.simulate import STRATEGIES, StrategyName
from packtool.errors import DataError
from packtool.planning.cost import MODEL_PRESETS, NO_LOAD, ModelSizes
from packtool.planning.skrull import SHARDED
from packtool.report.simulation import simulation_lines
from packtool.simulate.hardware import HARDWARE_PRESETS, Hardware
from packtool.simulate.machine import Constants, Machine, SimulatedSchedule, Timing
from packtool.simulate.run import Outcome, Simulation, arrange, draw_lengths, simulate
from packtool.simulate.strategies import TITLES, Sequences, SimulateOptions, place_in_groups, schedule

SIZES = ModelSizes.of_config(MODEL_PRESETS["qwen2.5-0.5b"])
NO_LAUNCHES = Constants(launch_us=0)


def machine(world_size: int = 32, constants: Constants = NO_LAUNCHES, **hardware: Any) -> Machine:
    changed: Hardware = replace(HARDWARE_PRESETS["h100"], **hardware)
    return Machine(sizes=SIZES, hardware=changed, world_size=world_size, constants=constants)


def options(cluster: Machine | None = None, **changes: Any) -> SimulateOptions:
    settings: dict[str, Any] = {
        "sequence_parallel_size": 8,
        "bucket_size": 26_000,
        "packing_length": 26_000,
        "num_steps": 3,
    }
    return SimulateOptions(machine=cluster or machine(), **{**settings, **changes})


def sequences_for(options: SimulateOptions, name: Any = "wikipedia") -> Sequences:
    return arrange(draw_lengths(name, 1000, seed=0), options)


def outcomes(options: SimulateOptions, data: Any = "wikipedia") -> dict[StrategyName, Outcome]:
    return {result.name: result for result in simulate(sequences_for(options, data), STRATEGIES, options)}


def one_sequence(cluster: Machine, tokens: int, num_ranks: int = 1) -> Timing:
    zero, num = np.zeros(1, dtype=np.int64), np.array([tokens])
    place = np.array([SHARDED if num_ranks > 1 else 0])
    plan = SimulatedSchedule(num_ranks, 1, zero, num, place, zero, zero, np.array([num_ranks]), zero)
    return cluster.time(plan, num)


def test_one_rank_and_one_sequence() -> None:
    """The formulas of the module, written out."""
    timing = one_sequence(machine(1), 1000)
    flops = (1000 + 300) * SIZES.cost.per_token + 1000 * SIZES.cost.per_target_token
    expected = flops / (989e12 * 0.8) + 1000 * (1000 + 512) * SIZES.cost.per_square / (989e12 * 0.35)
    assert timing.step_seconds[0] == pytest.approx(expected)
    assert timing.memory[0] == SIZES.state_bytes(1) + 1000 * SIZES.token_bytes(recompute=False)


def test_sliding_layers_cost_the_tokens_in_their_windows() -> None:
    """A short sample is not charged for a window that it does not fill; ranks that share one share its windows."""
    cost = replace(SIZES.cost, window=4096, per_window=SIZES.cost.per_square)
    slides = replace(machine(1), sizes=replace(SIZES, cost=cost))
    for tokens, num_ranks in ((1000, 1), (20_000, 1), (20_000, 4)):
        more = one_sequence(slides, tokens, num_ranks).local + one_sequence(slides, tokens, num_ranks).sharded
        more -= one_sequence(machine(1), tokens, num_ranks).local + one_sequence(machine(1), tokens, num_ranks).sharded
        window_tokens = min(tokens, 4096)
        windows = window_tokens * (2 * tokens - window_tokens) / num_ranks
        assert more == pytest.approx(np.full(num_ranks, windows * cost.per_window / (989e12 * 0.8)))


def test_only_labels_cost_logits() -> None:
    result, zero = machine(1), np.zeros(1, dtype=np.int64)
    plan = SimulatedSchedule(1, 1, zero, np.array([1000]), zero, zero, zero, np.array([1]), zero)
    thousand_lengths, hundred_lengths = (result.time(plan, np.array([num])).local[0] for num in (1000, 100))
    assert thousand_lengths - hundred_lengths == pytest.approx(900 * SIZES.cost.per_target_token / (989e12 * 0.8))


def test_one_sharded_sequence() -> None:
    result = machine(8)
    timing = one_sequence(result, 8000, 8)
    flops = (1000 + 300) * SIZES.cost.per_token + 1000 * SIZES.cost.per_target_token
    attention = 8000 * (1000 + 512) * SIZES.cost.per_square / (989e12 * 0.35)
    link, num_bytes = result.hardware, 8000 * SIZES.kv_bytes
    # K and V behind an eighth of attention, forward and backward; their gradients of 32 bits in the open.
    exposed = 24 * max(link.fixed_seconds(8), 2 * num_bytes / link.bytes_per_second(8, all_to_all=True))
    for share in (1 / 3.5, 2.5 / 3.5):
        exposed += max(24 * link.collective_seconds(num_bytes, 8) - share * attention / 8, 0)
    assert timing.exposed == pytest.approx(np.full(8, exposed))
    assert timing.row_seconds == pytest.approx(np.full(8, flops / (989e12 * 0.8) + attention + exposed))
    assert timing.step_seconds[0] == pytest.approx(timing.row_seconds[0] + timing.synchronisation)
    assert timing.communication_seconds[0] == pytest.approx(exposed + timing.synchronisation)


@pytest.mark.parametrize("recompute", [False, True])
def test_planner_of_skrull_gets_the_constants_of_the_simulation(recompute: bool) -> None:
    result = replace(machine(8), recompute=recompute)
    times, tokens = result.step_time(8), np.array([300, 5000])
    for num_ranks in (1, 8):
        loads = times.loads(tokens, SIZES.cost(tokens, SIZES.cost.attention(tokens), tokens), num_ranks)
        for load, size in zip(loads, tokens, strict=True):
            one = np.array([size])
            attention = result.attention_seconds(one, num_ranks)[0]
            assert load.attention / num_ranks / times.flops_per_second == pytest.approx(attention)
            linear = result.linear_seconds(one, one)[0] - times.batch_flops / times.flops_per_second
            seconds = load.flops / num_ranks / times.flops_per_second
            assert seconds == pytest.approx(linear / num_ranks + attention)
    assert times.launch_seconds == result.launch_seconds


@pytest.mark.parametrize("data", ["wikipedia", "chatqa2"])
@pytest.mark.parametrize("exchange_type", ["ring", "allgather"])
def test_planner_and_simulation_agree_on_schedule_times(data: str, exchange_type: Any) -> None:
    chosen_options = options(replace(machine(), sequence_parallel_type=exchange_type), num_steps=1)
    sequences = sequences_for(chosen_options, data)
    result = schedule("skrull", sequences, chosen_options)
    timing = chosen_options.machine.time(result, sequences.targets[result.samples])
    times = chosen_options.machine.step_time(8)
    true = sequences.lengths[result.samples].astype(np.int64)
    for cell in range(result.num_micro_batches):
        local, sharded, tokens = [NO_LOAD] * 8, NO_LOAD, 0
        for one in np.flatnonzero(result.micro_batch_of == cell):
            cost, place = result.tokens[one : one + 1], result.placement[one]
            flops = SIZES.cost(cost, SIZES.cost.attention(cost), target_tokens=true[one : one + 1])
            (load,) = times.loads(cost, flops, 8 if place == SHARDED else 1)
            if place == SHARDED:
                sharded, tokens = sharded.plus(load), tokens + int(cost[0])
            else:
                local[place] = local[place].plus(load)
        assert timing.micro_batch_seconds[cell] == pytest.approx(times.micro_batch(local, sharded, tokens, 8))


def test_a_gpu_is_never_faster_than_its_launches() -> None:
    result = machine(1, Constants(launch_us=5))
    assert result.launch_seconds == pytest.approx(24 * 150 * 5e-6)
    timing = one_sequence(result, 10)
    assert timing.step_seconds[0] == result.launch_seconds
    assert timing.launching[0] == pytest.approx(result.launch_seconds - timing.local[0])


def test_only_necessary_layers_recompute() -> None:
    """Times and memory lie between those without and with recomputation; memory fits wherever it can."""
    keeping = machine(1)
    recomputing, planned = replace(keeping, recompute=True), replace(keeping, recompute="auto")
    assert planned.largest_bucket(1) == recomputing.largest_bucket(1)
    longest = keeping.largest_bucket(1)
    num_layers = keeping.sizes.num_layers
    last_share = 0.0
    for tokens in (1000, longest, longest + 2000, 2 * longest, recomputing.largest_bucket(1)):
        without, with_all, timing = (one_sequence(each, tokens) for each in (keeping, recomputing, planned))
        (share,) = timing.recomputed
        assert (share * num_layers).is_integer()
        assert (share == 0) == (without.memory[0] <= keeping.usable_bytes)
        assert share >= last_share
        assert timing.memory[0] <= keeping.usable_bytes
        one_layer_less = timing.memory + (without.memory - with_all.memory) / num_layers
        assert share == 0 or one_layer_less[0] > keeping.usable_bytes
        expected = without.step_seconds + share * (with_all.step_seconds - without.step_seconds)
        assert timing.step_seconds == pytest.approx(expected)
        last_share = share
    assert 0.5 < last_share <= 1


def test_recomputation_costs_a_forward_pass_and_saves_memory() -> None:
    plain = machine(1)
    recomputing = replace(plain, recompute=True)
    tokens = np.array([5000])
    # Backward is twice forward in matrix products, and two and a half times in attention.
    assert recomputing.linear_seconds(tokens, tokens) == pytest.approx(plain.linear_seconds(tokens, tokens) * 4 / 3)
    assert recomputing.attention_seconds(tokens, 1) == pytest.approx(plain.attention_seconds(tokens, 1) * 4.5 / 3.5)
    (seconds,), (more,) = (one_sequence(one, 5000).step_seconds for one in (plain, recomputing))
    linear = recomputing.linear_seconds(tokens, tokens)
    assert more == pytest.approx(float(linear[0] + recomputing.attention_seconds(tokens, 1)[0]))
    assert more > seconds
    assert plain.largest_bucket(1) > plain.largest_bucket(64)
    assert recomputing.largest_bucket(1) > plain.largest_bucket(1) > 10_000


@pytest.mark.smoke
@pytest.mark.parametrize("data", ["wikipedia", "chatqa2"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_each_sequence_once(name: StrategyName, data: str) -> None:
    chosen_options = options()
    sequences = sequences_for(chosen_options, data)
    result = schedule(name, sequences, chosen_options)
    assert sorted(result.samples.tolist()) == list(range(3 * 256))
    assert (result.tokens >= sequences.lengths[result.samples]).all()
    assert (np.diff(result.micro_batch_of) >= 0).all()
    assert result.micro_batch_of.max() < result.num_micro_batches == len(result.micro_batch_num_devices)
    assert np.bincount(result.micro_batch_steps[result.micro_batch_of]).tolist() == [256, 256, 256]
    if name != "sorted":
        # The order of the optimizer's steps is nobody's to change.
        assert (result.samples // 256 == result.micro_batch_steps[result.micro_batch_of]).all()
    # Local sequences lie on a rank of their micro-batch, and this on devices that there are.
    ranks = result.micro_batch_num_devices[result.micro_batch_of]
    assert ((result.placement >= SHARDED) & (result.placement < ranks)).all()
    assert (result.micro_batch_first_device + result.micro_batch_num_devices <= result.num_devices).all()


@settings(max_examples=40)
@given(
    st.lists(st.one_of(st.integers(1, 2000), st.integers(1, 60_000)), min_size=1, max_size=60),
    st.sampled_from([1, 4, 12, 16]),
    st.sampled_from(STRATEGIES),
    st.sampled_from([2, 3]),
    st.sampled_from(["auto", "ring", "allgather"]),
)
def test_no_strategy_beats_perfect_balance_or_loses_work(
    drawn_lengths: list[int], world_size: int, name: StrategyName, zero_stage: int, exchange_type: Any
) -> None:
    cluster = replace(machine(world_size, Constants()), zero_stage=zero_stage, sequence_parallel_type=exchange_type)
    size = min(world_size, 4)
    chosen_options = options(
        cluster, sequence_parallel_size=size, bucket_size=16_000, packing_length=16_000, sequences_per_rank=7
    )
    sequences = (
        arrange(np.array(drawn_lengths), chosen_options, np.array(drawn_lengths) // 2)
        if min(drawn_lengths) <= 16_000
        else None
    )
    if sequences is None:
        return
    (result,) = simulate(sequences, [name], chosen_options)
    timing, plan = result.timing, result.timing.schedule
    assert sorted(plan.samples.tolist()) == list(range(result.num_sequences))
    # Tokens on devices are those of the sequences, and all of attention is done by somebody.
    assert timing.tokens.sum() == pytest.approx(plan.tokens.sum())
    hardware = cluster.hardware
    ideal = cluster.sizes.cost(plan.tokens, 0 * plan.tokens, sequences.targets[plan.samples]) / hardware.matmul_share
    ideal = (ideal + cluster.sizes.cost.per_square * plan.tokens.astype(float) ** 2 / hardware.attention_share).sum()
    assert timing.busy_seconds.sum() >= ideal / hardware.peak * (1 - 1e-9)
    assert (timing.step_seconds >= timing.busy_seconds.mean(axis=1) + timing.synchronisation - 1e-12).all()
    assert (timing.device_seconds >= timing.busy_seconds - 1e-12).all()
    shares = timing.shares
    assert sum(shares.values()) == pytest.approx(1)
    assert min(shares.values()) >= 0
    # Nobody is on two micro-batches at a time.
    for step in range(plan.num_steps):
        for device in range(plan.num_devices):
            micro_batches = plan.row_micro_batches[plan.row_keys == step * plan.num_devices + device]
            ends = timing.micro_batch_starts[micro_batches] + timing.micro_batch_seconds[micro_batches]
            assert (timing.micro_batch_starts[micro_batches][1:] >= ends[:-1] - 1e-12).all()


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(1, 2000), st.integers(1, 100_000)), min_size=1, max_size=60),
    st.sampled_from([1, 2, 8, 12, 32]),
)
def test_dynamic_groups_are_aligned_powers_of_two_and_fit(drawn_lengths: list[int], world_size: int) -> None:
    lengths, bucket = np.array(drawn_lengths), 16_000
    largest = world_size & -world_size
    for batches in place_in_groups(lengths, lengths, machine(world_size), bucket):
        assert sorted(one for batch in batches for one in batch.samples.tolist()) == list(range(len(lengths)))
        sizes = [batch.num_devices for batch in batches]
        assert sizes == sorted(sizes, reverse=True)
        for batch in batches:
            assert batch.num_devices & (batch.num_devices - 1) == 0
            assert batch.first_device % batch.num_devices == 0
            assert batch.first_device + batch.num_devices <= world_size
            alignment = 2 * batch.num_devices if batch.num_devices > 1 else 1
            tokens = -(-lengths[batch.samples] // alignment) * alignment
            fits = tokens.sum() <= bucket * batch.num_devices
            # Sequences over the largest group are included and reported as out of memory.
            assert fits or (batch.num_devices == largest and tokens.max() > bucket * largest)


@pytest.mark.parametrize("data", ["wikipedia", "lmsys", "chatqa2"])
def test_bounds_of_figures(data: str) -> None:
    for result in outcomes(options(), data).values():
        figures = result.figures(result)
        assert figures["speedup"] == 1
        assert 0 < figures["mfu"] < 0.8
        assert figures["balance"] >= 1
        assert 0 <= figures["communication_share"] < 1
        assert figures["sequences_per_step"] == 256
        is_local = result.name in ("padded", "packed", "packed-balanced")
        assert is_local <= figures["local_share"] <= (is_local or result.name in ("skrull", "dynamic-cp"))


@pytest.mark.parametrize(("data", "min_share"), [("wikipedia", 0.9), ("lmsys", 0.9), ("chatqa2", 0.3)])
def test_short_sequences_stay_local(data: str, min_share: float) -> None:
    chosen_options = options(machine(constants=Constants()), bucket_size=26 * 1024, num_steps=8)
    (result,) = simulate(arrange(draw_lengths(data, 2500, seed=0), chosen_options), ["skrull"], chosen_options)  # type: ignore[arg-type]
    assert result.local_share > min_share


def test_sharded_weights_save_memory_and_run_in_lock_step() -> None:
    full_weights, sharded = machine(), replace(machine(), zero_stage=3)
    assert sharded.state_bytes < full_weights.state_bytes
    assert sharded.largest_bucket(8) >= full_weights.largest_bucket(8)
    assert sharded.synchronisation_seconds == full_weights.synchronisation_seconds / 2
    two, six = outcomes(options(full_weights))["skrull"].timing, outcomes(options(sharded))["skrull"].timing
    assert (six.row_seconds >= sharded.gather_seconds).all()
    assert (six.device_seconds >= two.device_seconds - 1e-12).all()
    # A round begins on all devices at once.
    plan = six.schedule
    for round_index in range(int(plan.rounds.max()) + 1):
        for step in range(plan.num_steps):
            starts = six.micro_batch_starts[(plan.rounds == round_index) & (plan.micro_batch_steps == step)]
            assert len(starts) == 0 or np.ptp(starts) == 0


def test_twice_the_peak_is_half_the_computing() -> None:
    slow, fast = (outcomes(options(machine(peak_tflops=peak))) for peak in (500, 1000))
    for name in ("padded", "packed", "context-parallel"):
        assert slow[name].timing.busy_seconds == pytest.approx(2 * fast[name].timing.busy_seconds)


def test_links_without_limits_cost_nothing() -> None:
    free = machine(intra_node_gb_per_s=1e18, inter_node_gb_per_s=1e18, latency_us=0)
    for result in outcomes(options(free)).values():
        assert result.figures(result)["communication_share"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("data", ["wikipedia", "lmsys", "chatqa2"])
@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-7b"])
def test_skrull_is_not_slower_than_sharding_everything(data: str, model: str) -> None:
    cluster = Machine(
        sizes=ModelSizes.of_config(MODEL_PRESETS[model]),
        hardware=HARDWARE_PRESETS["h100"],
        world_size=32,
        recompute=True,
    )
    chosen_options = options(cluster, bucket_size=13_000, packing_length=13_000)
    sequences = sequences_for(chosen_options, data)
    shared, skrull = simulate(sequences, ["context-parallel", "skrull"], chosen_options)
    assert (skrull.timing.step_seconds <= shared.timing.step_seconds).all()
    assert not skrull.out_of_memory.any()


def test_unshared_oversized_sequence_is_out_of_memory() -> None:
    chosen_options = options(num_steps=1)
    lengths = np.full(256, 500, dtype=np.int32)
    lengths[7] = 78_000
    result = {one.name: one for one in simulate(arrange(lengths, chosen_options), STRATEGIES, chosen_options)}
    for name, one in result.items():
        assert one.out_of_memory.tolist() == [name in ("padded", "packed", "packed-balanced")], name
    assert result["padded"].figures(result["skrull"])["out_of_memory_steps"] == 1


def test_sequences_larger_than_a_group_are_left_out() -> None:
    chosen_options = options(bucket_size=1000, packing_length=1000)
    arranged = arrange(np.array([10, 8000, 8001, 10**6]), chosen_options)
    assert sorted(arranged.lengths.tolist()) == [10, 8000]
    assert (arranged.targets == arranged.lengths).all()
    assert len(arranged) == 2
    with pytest.raises(DataError, match="none has at most 8,000"):
        arrange(np.array([9000]), chosen_options)
    with pytest.raises(DataError, match="no tokens"):
        arrange(np.array([0, 5]), chosen_options)


def test_fewer_sequences_than_a_step() -> None:
    for result in simulate(arrange(np.arange(1, 6), options()), STRATEGIES, options()):
        assert result.num_steps == 1
        assert result.num_sequences == 5


def test_groups_of_one_gpu_share_nothing() -> None:
    """Groups of one GPU: nothing is shared, and nothing breaks."""
    chosen_options = options(sequence_parallel_size=1, sequences_per_rank=8)
    for result in simulate(sequences_for(chosen_options), STRATEGIES, chosen_options):
        if result.name != "dynamic-cp":
            assert (result.timing.schedule.micro_batch_num_devices == 1).all()
            assert result.timing.exposed.sum() == 0
        assert result.title == TITLES[result.name]


def test_steps_dominated_by_one_sequence_are_counted() -> None:
    """Of two steps of 16 sequences for 4 groups, one has a sequence with far more work than a group's mean."""
    settings = options(sequences_per_rank=4, num_steps=2)
    lengths = np.full(32, 1000, dtype=np.int32)
    lengths[5] = 100_000
    sequences = Sequences(lengths, lengths.astype(np.int64))
    for group_size, expected in ((8, 1), (32, 0)):
        one_size = replace(settings, sequence_parallel_size=group_size, sequences_per_rank=group_size // 2)
        results = list(simulate(sequences, ("packed-shared", "skrull"), one_size))
        simulation = Simulation(results, one_size, "lengths", "lengths", 32, 0, "model", 0.0)
        assert simulation.num_dominated_steps == expected
        warnings = [line for line in simulation_lines(simulation) if "--sequence-parallel-size" in line]
        assert [line.split("Compare with ")[1] for line in warnings] == ["--sequence-parallel-size 16."] * expected
