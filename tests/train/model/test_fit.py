"""Settings that fit into a GPU's memory: what is proposed fits, is the cheapest, and is what training does."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool.attention.parallel.axes import Axes
from packtool.cli.main import run
from packtool.config.plan import PlanConfig
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.progress import SilentProgress
from packtool.report.plan import fit_lines
from packtool.simulate.machine import Constants
from packtool.train.loop import checks
from packtool.train.model import fit as fit_module
from packtool.train.model import memory
from packtool.train.model.fit import MAX_PROPOSALS, Fit, Proposal, find_fit
from packtool.train.model.memory import CachedTracer, MemoryEstimate
from packtool.train.model.trace import PassBytes
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.shared_prefixes import find_shared_prefixes
from tests.train.alike import make_alike_world
from tests.train.tiny import TinyWorld

GIB = 2**30
WORLD_SIZE = 4


def plan_config(tiny: TinyWorld, fit: int, **options: Any) -> PlanConfig:
    settings: dict[str, Any] = {"cached_dataset": (tiny.cache,), "world_size": WORLD_SIZE, "train_type": "full"}
    return PlanConfig(fit=fit, hardware="h100", **settings | options)


def reported_bytes(config: Any, _model: Any, _dtype: Any, tokens: RankTokens, axes: Axes) -> PassBytes:
    """A stand-in for the trace, which rises with the tokens as it does."""
    each = (1000 if config.gradient_checkpointing else 4000) + 10 * axes.ring_size * axes.ulysses_size
    peak = each * tokens.computed + 100 * tokens.local_vision + 50_000
    return PassBytes(kept=peak, peak=peak, layers=(each * tokens.computed // 2,) * 2)


@pytest.fixture
def estimates_without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "traced_pass", reported_bytes)


def check(fit: Fit, budget: float) -> None:
    assert 0 < len(fit.proposals) <= MAX_PROPOSALS
    assert fit.num_tried <= fit.num_settings
    assert all(each.memory is not None and each.memory.total * GIB <= budget for each in fit.proposals)
    min_seconds = min(each.seconds_per_token for each in fit.proposals)
    assert fit.proposals[0].seconds_per_token <= 1.01 * min_seconds


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.floats(min_value=1.5e6, max_value=2e7), st.floats(min_value=1.0, max_value=4.0), st.data())
def test_proposals_fit_and_more_memory_is_never_slower(
    tiny: TinyWorld, estimates_without_traces: None, fit: float, more: float, data: st.DataObject
) -> None:
    plan_options: dict[str, Any] = {
        "train_type": data.draw(st.sampled_from(["full", "lora"])),
        "gradient_accumulation_steps": data.draw(st.sampled_from([1, 2])),
        "world_size": data.draw(st.sampled_from([1, 2, 4])),
    }
    min_seconds_by_size = []
    for size in (int(fit), int(fit * more)):
        try:
            fit_result = find_fit(plan_config(tiny, size, **plan_options), SilentProgress())
        except ConfigError:
            assert not min_seconds_by_size, "what fits into little fits into more"
            continue
        check(fit_result, size * Constants().usable_memory)
        min_seconds_by_size.append(fit_result.proposals[0].seconds_per_token)
    assert (
        min_seconds_by_size == sorted(min_seconds_by_size, reverse=True)
        or min_seconds_by_size[1] <= 1.01 * min_seconds_by_size[0]
    )


def test_proposal_equals_the_dry_run_of_its_command(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced through the model; estimates are bit-identical."""
    plan_options: dict[str, Any] = {"gradient_accumulation_steps": 2, "freeze_vit": False, "num_train_epochs": 3.0}
    fit = find_fit(plan_config(tiny, 8_000_000, **plan_options), SilentProgress())
    check(fit, 8_000_000 * Constants().usable_memory)
    estimates: list[MemoryEstimate] = []
    preview = checks.estimate_training

    def noted(*args: Any) -> Any:
        estimate, precision = preview(*args)
        estimates.append(estimate)
        return estimate, precision

    monkeypatch.setattr(checks, "estimate_training", noted)
    monkeypatch.chdir(tmp_path)
    # With ``auto``, a dry run counts all layers as recomputing.
    fixed = [each for each in fit.proposals if not each.run.plans_recomputation]
    proposals_by_sharding = {(each.sharding, each.run.sequence_parallel_ranks): each for each in fixed}
    assert len(proposals_by_sharding) > 2
    for each in list(proposals_by_sharding.values())[:4]:
        processes, *words = shlex.split(each.command(WORLD_SIZE, 8))
        assert processes == f"NPROC_PER_NODE={WORLD_SIZE}"
        assert words.pop(0) == "packtool"
        monkeypatch.setenv(*processes.split("="))
        assert run([*words, "--dry-run", "--hardware", "h100"]) == 0
        assert estimates.pop() == each.memory


def test_shared_prefixes_save_time_and_keys_take_memory(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimates_without_traces: None
) -> None:
    world = make_alike_world(tiny, tmp_path)
    options: dict[str, Any] = {"world_size": 2, "packing_length": 256}
    unshared = Fit(plan_config(world, GIB, share_prefix="false", **options))
    fit = Fit(plan_config(world, GIB, **options))
    max_length = fit.inputs.options.max_length
    saved = find_shared_prefixes(fit.base, fit.files.config, fit.reader, capacity=256, max_length=max_length)[0]
    assert saved is not None
    for each in fit.accepted_runs():
        shared, plain = fit.estimate_time(each), unshared.estimate_time(each)
        assert shared.tokens == plain.tokens
        assert shared.seconds <= plain.seconds
        assert shared.token_share_saved == pytest.approx(saved.saved)
        assert all(tokens.keys > 0 for tokens in shared.micro_batches)
    # Gathering the keys of prefixes takes time, and only that depends on the bandwidth of memory.
    run_settings = next(each for each in fit.accepted_runs() if each.gradient_checkpointing is False)
    times = {"fast": fit.estimate_time(run_settings)}
    fit.hardware = dataclasses.replace(fit.hardware, hbm_gb_per_s=fit.hardware.hbm_gb_per_s / 1e6)
    unshared.hardware = fit.hardware
    times["slow"] = fit.estimate_time(run_settings)
    assert 0 < times["fast"].gathering_share < times["slow"].gathering_share < 1
    assert times["fast"].seconds < times["slow"].seconds
    assert unshared.estimate_time(run_settings).gathering_share == 0
    assert times["fast"].micro_batches == times["slow"].micro_batches
    words = [
        "plan",
        world.cache,
        "--fit",
        "1GB",
        "--world-size",
        "2",
        "--packing-length",
        "256",
        "--share-prefix",
        "true",
    ]
    assert run([*words, "--sequence-parallel-size", "1"]) == 0


def test_settings_of_the_user_are_kept(tiny: TinyWorld, estimates_without_traces: None) -> None:
    fixed: dict[str, Any] = {
        "packing_length": 200,
        "gradient_checkpointing": True,
        "fsdp": ("full_shard",),
        "sequence_parallel_size": 2,
    }
    fit = find_fit(plan_config(tiny, GIB, **fixed, lora_rank=4, train_type="lora"), SilentProgress())
    (only,) = fit.proposals
    assert {name: getattr(only.run, name) for name in fixed} == fixed
    assert (only.run.lora_rank, only.run.train_type) == (4, "lora")
    assert fit.num_settings == 1
    for name in fixed:
        searched = find_fit(plan_config(tiny, GIB, **{name: fixed[name]}), SilentProgress())
        assert all(getattr(each.run, name) == fixed[name] for each in searched.proposals)
        assert searched.num_settings > 1
    kahan = find_fit(plan_config(tiny, GIB, master_weights="kahan"), SilentProgress())
    assert {each.sharding for each in kahan.proposals} == {"none"}, "what training refuses is not tried"
    with pytest.raises(ConfigError, match="--master-weights kahan: FSDP"):
        find_fit(plan_config(tiny, GIB, master_weights="kahan", fsdp=("full_shard",)), SilentProgress())
    with pytest.raises(ConfigError, match="heads"):
        find_fit(
            plan_config(tiny, GIB, sequence_parallel_size=3, world_size=3, sequence_parallel_type="ulysses"),
            SilentProgress(),
        )


def test_no_sharding_with_one_process(tiny: TinyWorld, estimates_without_traces: None) -> None:
    fit = find_fit(plan_config(tiny, GIB, world_size=1), SilentProgress())
    assert {each.sharding for each in fit.proposals} == {"none"}
    assert fit.proposals[0].command(1, 8).startswith("packtool train ")


def test_commands_of_several_machines(tiny: TinyWorld, estimates_without_traces: None) -> None:
    proposal: Proposal = find_fit(plan_config(tiny, GIB, world_size=1), SilentProgress()).proposals[0]
    command = proposal.command(16, 8)
    assert command.startswith("NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 NPROC_PER_NODE=8 packtool train ")


def test_error_names_the_nearest_settings_if_none_fits(tiny: TinyWorld, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", tiny.cache, "--fit", "1MB", "--world-size", "2", "--train-type", "full"]
    assert run(words) == 2
    stderr = capsys.readouterr().err
    for part in (
        "no settings fit into 0.0 GiB",
        "The nearest settings, --packing-length 128",
        "sharding fsdp full_shard",
        "Try ",
    ):
        assert part in stderr


def test_as_json_and_as_a_table(
    tiny: TinyWorld, estimates_without_traces: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", tiny.cache, "--fit", "1GB", "--world-size", "2", "--hardware", "a100"]
    assert run([*words, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["num_tried"] == output["num_too_large"] + len(output["proposals"])
    best = output["proposals"][0]
    assert best["memory_gib"] < output["budget_gib"] < output["fit"] / GIB
    assert run(words) == 0
    stdout = capsys.readouterr().out
    for part in (best["command"], f"{output['num_settings']:,} settings for A100", "packing length", "--hardware a100"):
        assert part in stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fit", "80"], "--fit 80: too little memory for a model"),
        (["--fit", "1KB"], "--fit 1KB: too little memory for a model"),
        (["--fit", "1GB", "--sweep", "200"], "--sweep cannot be combined with --fit"),
        (["--fit", "1GB", "--schedule", "skrull", "--bucket-size", "200"], "--fit requires packing"),
        (["--gradient-checkpointing", "true"], "--gradient-checkpointing requires --model or --fit"),
        (["--fit", "1GB", "--fsdp", "sharded"], "--fsdp sharded: known are"),
        (["--fit", "little"], "give one such as 200GB"),
    ],
)
def test_conflicting_options_of_fit_are_refused(
    tiny: TinyWorld, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", tiny.cache, *words]) == 2
    assert message in capsys.readouterr().err


def test_untraceable_model_is_refused(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks_for_numbers(*_: Any) -> int:
        raise RuntimeError("a number is needed on the host")

    monkeypatch.setattr(memory, "traced_pass", asks_for_numbers)
    with pytest.raises(UnsupportedModelError, match="cannot be estimated"):
        find_fit(plan_config(tiny, GIB), SilentProgress())


def test_each_pass_is_traced_once(tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[RankTokens, Axes]] = []

    def counted(config: Any, model: Any, dtype: Any, tokens: RankTokens, axes: Axes) -> PassBytes:
        calls.append((tokens, axes))
        return reported_bytes(config, model, dtype, tokens, axes)

    monkeypatch.setattr(memory, "traced_pass", counted)
    trace, config = CachedTracer(), tiny.config("out")
    none: Any = None
    tokens, single_axes = RankTokens(computed=100, vision=10), Axes()
    known = reported_bytes(config, none, none, tokens, single_axes).peak
    for fsdp_option in ((), ("full_shard",), ("shard_grad_op",)):
        sharded = dataclasses.replace(config, fsdp=fsdp_option, packing_length=300)
        assert trace(sharded, none, none, tokens, Axes(reason="so it is")) == known
    assert [called for called, _ in calls] == [tokens] * 2, "with sharding and without"

    def at_least(axes: Axes = single_axes, **token_counts: int) -> int:
        return trace.lower_bound(config, none, none, RankTokens(**token_counts), axes)

    assert at_least(computed=200, vision=10) == at_least(computed=1 << 20, vision=1 << 19) == known
    assert at_least(Axes(1, 2), computed=200, vision=10) == known, "sharing a sequence needs no less"
    assert at_least(computed=99, vision=10) == at_least(computed=200, vision=9) == 0
    trace(config, none, none, RankTokens(computed=50), Axes(1, 2))
    assert not at_least(computed=60)


def test_planned_recomputation_is_searched(tiny: TinyWorld) -> None:
    """Slower than without recomputation and faster than with that of all layers, within the budget; all towers keep."""
    options: dict[str, Any] = {"world_size": 1, "packing_length": 512, "freeze_vit": False}
    options["vit_gradient_checkpointing"] = False
    every_layer, none = (
        find_fit(plan_config(tiny, GIB, **options, gradient_checkpointing=value), SilentProgress()).proposals[0]
        for value in (True, False)
    )
    low, high = (each.memory.total * GIB / Constants().usable_memory for each in (every_layer, none) if each.memory)
    fit = find_fit(plan_config(tiny, int(0.25 * low + 0.75 * high), **options), SilentProgress())
    best = fit.proposals[0]
    assert (best.run.gradient_checkpointing, best.run.memory_budget) == ("auto", fit.config.fit)
    assert "--gradient-checkpointing auto --memory-budget" in best.command(1, 8)
    assert none.seconds < best.seconds < every_layer.seconds
    figures = fit.figures()
    planned = figures["recomputation"]
    assert planned["layers"] == 2
    assert planned["recomputing_layers"]["max"] == 1
    assert planned["budget_gib"] == pytest.approx(fit.budget / GIB)
    assert planned["peak_gib"] == pytest.approx(figures["proposals"][0]["memory_gib"])
    assert planned["peak_gib"] <= planned["budget_gib"]
    assert any("layers recompute (median" in line for line in fit_lines(figures, None))
    # Where all activations can be kept, settings that plan recomputation are not proposed, except on request.
    roomy = find_fit(plan_config(tiny, GIB, **options), SilentProgress())
    assert [each.run.gradient_checkpointing for each in roomy.proposals] == [False]
    requested = find_fit(plan_config(tiny, GIB, **options, gradient_checkpointing="auto"), SilentProgress())
    assert requested.figures()["recomputation"]["recomputing_layers"]["max"] == 0
    assert requested.proposals[0].seconds == none.seconds


def test_all_layers_recompute_where_layers_cannot_be_planned(
    tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch, estimates_without_traces: None
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedModelError("layers cannot be switched", "")

    monkeypatch.setattr(fit_module, "plan_recomputation", refuse)
    fit = find_fit(plan_config(tiny, 3_000_000), SilentProgress())
    assert True in {each.run.gradient_checkpointing for each in fit.proposals}
    assert "auto" not in {each.run.gradient_checkpointing for each in fit.proposals}
