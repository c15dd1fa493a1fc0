"""Planned recomputation: the same results as with all or no layers, and a peak within the budget."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from packtool.attention.parallel.axes import Axes
from packtool.batch.spec import InputSpec, auto_class
from packtool.cli.main import run as cli
from packtool.encode.families import MediaLimits
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.train.model.loss import LossFunction
from packtool.train.model.recompute import LayerPlan, LayerSwitch, PassBound, plan_recomputation
from packtool.train.model.trace import run_pass, set_traced_attention
from packtool.train.model.trainable import make_trainable, switchable_layers
from packtool.train.prepare.figures import RankTokens
from packtool.train.run import train
from tests.forked import run_ranks
from tests.train.jobs import Job, run_jobs
from tests.train.model.switched import (
    LONGEST,
    NUM_LAYERS,
    deep_config,
    plan_of,
    real_pass,
    run_config,
    switched_model,
    traced_peak,
)
from tests.train.test_compiled import RecordingProgress
from tests.train.tiny import TinyWorld, read_metrics


@pytest.fixture(scope="module")
def plans() -> dict[str, LayerPlan]:
    """Plans with the bounds of each model, for a budget without limits."""
    return {name: plan_of(name, 1e12) for name in LONGEST}


@settings(deadline=None, max_examples=12)
@given(st.data())
@pytest.mark.parametrize("name", LONGEST)
def test_peak_stays_within_the_budget(name: str, plans: dict[str, LayerPlan], data: st.DataObject) -> None:
    longest = LONGEST[name]
    computed = data.draw(st.integers(2, longest.computed))
    vision = data.draw(st.integers(0, min(longest.vision, computed - 1)))
    bounds = [bound(**vars(longest)) for bound in (plans[name].without_recomputation, plans[name].with_recomputation)]
    budget = data.draw(st.floats(0.5 * bounds[1], 1.1 * bounds[0]))
    plan = dataclasses.replace(plans[name], budget=budget)
    tokens = RankTokens(computed=computed, vision=vision)
    num_layers = int(plan.num_layers(**vars(tokens)))
    if plan.exceeds(**vars(tokens)):
        assert num_layers == NUM_LAYERS
    else:
        assert traced_peak(name, tokens, num_layers, in_towers=False) <= budget


@pytest.mark.parametrize("name", LONGEST)
def test_no_layer_recomputes_without_need(name: str, plans: dict[str, LayerPlan]) -> None:
    """With two layers less, the traced peak of the longest pass exceeds the budget."""
    tokens, plan = LONGEST[name], plans[name]
    high, low = (bound(**vars(tokens)) for bound in (plan.without_recomputation, plan.with_recomputation))
    for share in (0.2, 0.5, 0.8):
        budget = low + share * (high - low)
        num_layers = int(dataclasses.replace(plan, budget=budget).num_layers(**vars(tokens)))
        assert 0 < num_layers < NUM_LAYERS
        assert traced_peak(name, tokens, max(num_layers - 2, 0), in_towers=False) > budget * 0.9


@pytest.mark.parametrize("name", LONGEST)
def test_losses_and_gradients_are_bit_identical(name: str) -> None:
    """With dropout, whose masks are drawn again where a layer recomputes."""
    batch, config = real_pass(name), deep_config(name)
    results = []
    adapters: dict[str, Any] = {"train_type": "lora", "lora_dropout": 0.3, "freeze_vit": False}
    for num_layers in (0, 1, 4, NUM_LAYERS):
        torch.manual_seed(0)
        model = switched_model(config, num_layers, in_towers=num_layers == NUM_LAYERS, **adapters)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter)  # otherwise adapters do nothing
        model.train()
        loss = LossFunction(model)(model, batch).weighted_sum()
        loss.backward()
        results.append([loss.detach(), *(each.grad for each in model.parameters() if each.requires_grad)])
    for result in results[1:]:
        assert all(torch.equal(ours, kept) for ours, kept in zip(result, results[0], strict=True))


@pytest.mark.parametrize("name", LONGEST)
def test_computed_peak_is_the_traced_one(name: str) -> None:
    """On the CPU, for several numbers of layers, with the tensors of flash attention."""
    batch = real_pass(name)
    for num_layers in (0, 3, NUM_LAYERS):
        real = switched_model(deep_config(name), num_layers)
        set_traced_attention(real)
        real.train()
        for parameter in real.parameters():
            parameter.grad = torch.zeros_like(parameter)
        computed = run_pass(real, batch).peak
        assert computed == pytest.approx(traced_peak(name, LONGEST[name], num_layers, in_towers=False), rel=0.05)


def test_recomputed_flops_are_those_of_the_layers() -> None:
    """The forward pass of each recomputing layer is computed twice, and nothing else is."""
    batch, flops = real_pass("qwen3"), []
    for num_layers in range(NUM_LAYERS + 1):
        model = switched_model(deep_config("qwen3"), num_layers).train()
        with FlopCounterMode(display=False) as counter:
            LossFunction(model)(model, batch).weighted_sum().backward()
        flops.append(counter.get_total_flops())
    added = np.diff(flops)
    assert len(set(added)) == 1
    assert added[0] > 0


def test_switch_counts_tokens_and_towers(plans: dict[str, LayerPlan]) -> None:
    name = "qwen3_vl"
    longest, config = vars(LONGEST[name]), deep_config(name)
    kept, recomputed = plans[name].without_recomputation(**longest), plans[name].with_recomputation(**longest)
    model = switched_model(config, 0)
    layers, spec = switchable_layers(model), InputSpec("", config, MediaLimits())
    in_tower = [module for module in model.model.visual.modules() if hasattr(module, "gradient_checkpointing")]
    for budget, num_layers, in_towers in (
        (2 * kept, 0, False),
        (recomputed, NUM_LAYERS, False),
        (0.5, NUM_LAYERS, True),
    ):
        plan = dataclasses.replace(plans[name], budget=budget)
        switch = LayerSwitch(model, plan, spec, switches_towers=True)
        assert switch.set_for(real_pass(name)) == num_layers
        assert [layer.gradient_checkpointing for layer in layers] == [index < num_layers for index in range(NUM_LAYERS)]
        assert {module.gradient_checkpointing for module in in_tower} == {in_towers}
        num_tokens = real_pass(name).input_ids.numel()
        assert switch.take_counts() == (num_tokens * num_layers, num_tokens * NUM_LAYERS)
        assert switch.take_counts() == (0, 0)
        # A switch that leaves towers alone.
        LayerSwitch(model, dataclasses.replace(plan, budget=1e12), spec, switches_towers=False).set_for(real_pass(name))
        assert {module.gradient_checkpointing for module in in_tower} == {in_towers}


def test_shares_of_layers_may_differ() -> None:
    """A first layer that saves little is not counted as a full one."""
    plan = LayerPlan(50.0, PassBound(100.0), PassBound(0.0), np.array([0.0, 0.1, 0.5, 1.0]))
    assert [
        int(dataclasses.replace(plan, budget=budget).num_layers(computed=1)) for budget in (100, 91, 90, 50, 49)
    ] == [*(0, 1, 1, 2, 3)]
    assert "2 to 2 of 3 layers" in plan.line(computed=np.array([1]))


def test_figures_of_a_plan(plans: dict[str, LayerPlan]) -> None:
    """Of a short and a long micro-batch: layers, FLOPs as torch counts them, and the peak against the budget."""
    full = plans["qwen3"]
    high, low = (bound(computed=400) for bound in (full.without_recomputation, full.with_recomputation))
    plan = dataclasses.replace(full, budget=(high + low) / 2)
    tokens = {"computed": np.array([2, 400])}
    figures, num_layers = plan.figures(**tokens), int(plan.num_layers(computed=400))
    layers = figures["recomputing_layers"]
    assert (layers["min"], layers["median"], layers["max"]) == (0, num_layers / 2, num_layers)
    assert figures["layers"] == NUM_LAYERS
    fixed, gib = plan.fixed, 2**30
    assert fixed > 0
    assert figures["budget_gib"] * gib == pytest.approx(fixed + plan.budget)
    traced = traced_peak("qwen3", LONGEST["qwen3"], num_layers)
    assert traced <= figures["peak_gib"] * gib - fixed <= plan.budget
    flops = []
    for recomputed in (0, num_layers):
        model = switched_model(deep_config("qwen3"), recomputed).train()
        with FlopCounterMode(display=False) as counter:
            # Few tokens, because the figure leaves out attention, whose share is large in so small a model. torch stops
            # before the last product of a layer, a fifth of this model's, because nothing saves its output.
            LossFunction(model)(model, real_pass("qwen3", RankTokens(computed=16))).weighted_sum().backward()
        flops.append(counter.get_total_flops())
    assert figures["recomputed_flops"] == pytest.approx((flops[1] / flops[0] - 1) / 0.8, rel=0.05)
    assert f"(median {num_layers / 2:g})" in plan.line(**tokens)


def test_ranks_that_share_sequences_recompute_the_same_layers() -> None:
    """All micro-batches recompute what a full one needs."""
    axes = Axes(ring_size=2)
    config = run_config(gradient_checkpointing="auto", sequence_parallel_size=2, sequence_parallel_type="ring")
    arguments: dict[str, Any] = {"dtype": torch.float32, "world_size": 2}
    plan = plan_recomputation(config, axes, [RankTokens(computed=400)], deep_config("qwen3"), **arguments, budget=1e12)
    low, high = plan.with_recomputation(computed=400), plan.without_recomputation(computed=400)
    shared = dataclasses.replace(plan, budget=(low + high) / 2)
    assert int(shared.num_layers(computed=2)) == int(shared.num_layers(computed=400)) > 0


def test_fixed_number_of_layers() -> None:
    model = make_trainable(
        auto_class(deep_config("qwen3")).from_config(deep_config("qwen3")), run_config(gradient_checkpointing=4)
    )
    assert [layer.gradient_checkpointing for layer in switchable_layers(model)] == [True] * 4 + [False] * 2
    with pytest.raises(ConfigError, match="--gradient-checkpointing 7: this Qwen3ForCausalLM has 6 layers"):
        make_trainable(model, run_config(gradient_checkpointing=7))


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match="--memory-budget 1MB: weights, gradients and optimizer need"):
        plan_of("qwen3", 1e6, memory_budget=10**6)
    with pytest.raises(UnsupportedModelError, match="weights, gradients and optimizer need"):
        plan_of("qwen3", 1e6)
    with pytest.raises(UnsupportedModelError, match="memory of the device is unknown"):
        plan_recomputation(
            run_config(), Axes(), [], deep_config("qwen3"), dtype=torch.float32, world_size=1, budget=None
        )
    (problem,) = run_config(gradient_checkpointing=True, memory_budget=10**9).problems()
    assert "--memory-budget limits what --gradient-checkpointing auto keeps" in problem


RUN: dict[str, Any] = {"train_type": "lora", "lora_dropout": 0.3, "freeze_vit": False, "max_steps": 6}
RUN |= {
    "gradient_accumulation_steps": 2,
    "packing": False,
    "per_device_train_batch_size": 4,
    "dynamic_batch_tokens": 300,
}
PLANNED: dict[str, Any] = {"memory_budget": 7_000_000}
"""A budget within which the micro-batches of ``RUN`` recompute none, one or both layers."""


def test_planned_run_equals_one_without_recomputation(
    tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default with --memory-budget; a dry run says the same, and a plan shows its own."""
    runs = {"none": {"gradient_checkpointing": False}, "all": {"gradient_checkpointing": True}, "planned": PLANNED}
    progress = RecordingProgress()
    for name, options in runs.items():
        train(tiny.config(tmp_path / name, **RUN | options), progress)
    lines = {name: read_metrics(tmp_path / name) for name in runs}
    for name in ("all", "planned"):
        for key in ("loss", "grad_norm", "token_accuracy"):
            assert [line[key] for line in lines[name]] == [line[key] for line in lines["none"]]
        weights = [
            (tmp_path / each / "checkpoint-6" / "adapter_model.safetensors").read_bytes() for each in (name, "none")
        ]
        assert weights[0] == weights[1]
    shares = {name: [line.get("recomputed_layers") for line in lines[name]] for name in runs}
    assert shares["none"] == shares["all"] == [None] * 6
    assert 0 <= min(shares["planned"]) < max(shares["planned"]) <= 1
    flops = {name: [line["recomputed_flops"] for line in lines[name]] for name in runs}
    assert set(flops["none"]) == {0}
    for share, planned_flops, all_flops in zip(shares["planned"], flops["planned"], flops["all"], strict=True):
        assert (
            share * all_flops * 0.5 <= planned_flops <= share * all_flops
        )  # of the language model, without its towers
    planned = [line for line in progress.lines if line.startswith("gradient checkpointing auto")]
    assert "0 to 2 of 2 layers recompute" in planned[0]
    dry = RecordingProgress()
    train(tiny.config(tmp_path / "dry", **RUN | PLANNED, dry_run=True), dry)
    assert planned[0] in dry.lines
    words = ["plan", tiny.cache, "--model", tiny.model, "--packing-length", "300", "--memory-budget", "7MB", "--json"]
    assert cli(words) == 0
    (figures,) = json.loads(capsys.readouterr().out)["recomputation"]
    assert figures["layers"] == 2
    assert figures["peak_gib"] > 0
    assert cli(words[:-1]) == 0
    assert "of 2 layers recompute in a micro-batch" in capsys.readouterr().out


def test_unknown_memory_recomputes_all_layers(tiny: TinyWorld, tmp_path: Path) -> None:
    progress = RecordingProgress()
    train(tiny.config(tmp_path, gradient_checkpointing="auto", max_steps=1, save_strategy="no"), progress)
    assert (
        "gradient checkpointing auto: all layers recompute, because the memory of the device is unknown"
        in progress.lines
    )


def run_with_different_layers(tiny: TinyWorld, jobs: list[Job]) -> None:
    """Each rank recomputes other layers than the other one, in every micro-batch."""
    number = int(os.environ["RANK"])

    def set_for(switch: Any, _: Any) -> int:
        nonlocal number
        number += 1
        for index, layer in enumerate(switch._layers):
            layer.gradient_checkpointing = index < number % 3
        for module in switch._in_towers:
            module.gradient_checkpointing = number % 2 == 0
        return number % 3

    LayerSwitch.set_for = set_for  # type: ignore[method-assign,assignment]  # in a forked process
    run_jobs(tiny, jobs)


def test_ranks_may_recompute_different_layers(tiny: TinyWorld, tmp_path: Path) -> None:
    """With FSDP, recomputation gathers no weights, so ranks issue the same collectives."""
    steps: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    auto: dict[str, Any] = {"gradient_checkpointing": "auto", "memory_budget": 10**9}
    jobs: list[Job] = []
    for name, sharding in {"fsdp": {"fsdp": ["full_shard"]}, "ddp": {}}.items():
        jobs.append(("train", tmp_path / name / "none", steps | sharding | {"gradient_checkpointing": False}))
        jobs.append(("train", tmp_path / name / "auto", steps | sharding | auto))
    run_ranks(2, run_with_different_layers, tiny, jobs, scratch=tmp_path)
    for name in ("fsdp", "ddp"):
        none, planned = (read_metrics(tmp_path / name / kind) for kind in ("none", "auto"))
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in planned] == [line[key] for line in none]


def test_pictures_are_counted_once_where_videos_have_the_same_placeholder(plans: dict[str, LayerPlan]) -> None:
    config = deep_config("qwen3_vl")
    spec = InputSpec("", config, MediaLimits())
    batch = real_pass("qwen3_vl")
    seen: list[dict[str, Any]] = []

    class Recorded(LayerPlan):
        def num_layers(self, **tokens: Any) -> Any:
            seen.append(tokens)
            return super().num_layers(**tokens)

    plan = Recorded(**vars(plans["qwen3_vl"]))
    switch = LayerSwitch(switched_model(config, 0), plan, spec, switches_towers=False)
    pad_id = switch._pad_ids["image"]
    for pads in ({"image": pad_id, "video": 93}, {"image": pad_id, "video": pad_id}):
        switch._pad_ids = pads
        switch.set_for(batch)
    assert seen[0] == seen[1]
    assert seen[0]["vision"] == LONGEST["qwen3_vl"].vision
