"""The loss is the exact mean over a step's targets, whatever a micro-batch is made of; and who is asked for it."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

import packtool
from packtool.attention.kernel import LeakError
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.launch.world import World
from packtool.train.loop.step_loader import StepLoader
from packtool.train.model.load import input_spec
from packtool.train.model.loss import StepMean, target_losses
from packtool.train.prepare.run import Run
from tests.library.conftest import HERE, PLAN
from tests.train.alike import make_alike_world
from tests.train.tiny import TinyWorld, export_rows

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def worlds(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyWorld]:
    """Caches of plain samples, of samples with weights, and of samples that begin alike."""
    root = tmp_path_factory.mktemp("worlds")
    rows = json.loads(Path(tiny.rows).read_text())
    for row_index, row in enumerate(rows):
        row["messages"][1]["loss_scale"] = 0.5 + row_index % 3
    shutil.copytree(Path(tiny.rows).parent / "pictures", root / "rows" / "pictures")
    (root / "rows" / "train.json").write_text(json.dumps(rows))
    weighted = TinyWorld(tiny.model, str(root / "cache"), str(root / "rows" / "train.json"))
    export_rows(weighted, weighted.cache)
    return {"plain": tiny, "weighted": weighted, "alike": make_alike_world(tiny, root / "alike")}


def step_losses(model: PreTrainedModel, tiny: TinyWorld, settings: dict[str, Any], folder: Path) -> list[float]:
    """What ``packtool train`` would log for each step if nothing were learned."""
    run = Run.of(tiny.config(folder, **settings), World())
    losses = []
    for step in StepLoader(run, input_spec(run)):
        sums = [target_losses(model, batch, label_logits_only=True).weighted_sum() for batch in step.micro_batches]
        losses.append(float(StepMean(step.figures.units).contribution(torch.stack(sums).sum())))
    return losses


SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tokens": ("plain", {}, {}),
    "samples": ("plain", {}, {"loss_reduction": "sample"}),
    "last round": ("plain", {}, {"loss_scale": "last_round"}),
    "weights": ("weighted", {}, {}),
    "shared prefixes": ("alike", {}, {}),
    "samples of shared prefixes": ("alike", {}, {"loss_reduction": "sample"}),
    "no padding, unpacked": ("plain", {"packing": False, "dynamic_batch_tokens": 200}, {}),
    "several packs a micro-batch": ("plain", {"per_device_train_batch_size": 2}, {}),
}


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_losses_equal_those_of_packtool_train(
    model: PreTrainedModel, worlds: dict[str, TinyWorld], tmp_path: Path, name: str
) -> None:
    """As ``packtool train`` has it; on two ranks, too, and for trainers that ask the model for it."""
    world, planned, options = SETTINGS[name]
    expected = step_losses(model, worlds[world], PLAN | planned | options, tmp_path)
    for world_size, accumulation in ((1, 2), (2, 1)):
        plan_options = PLAN | planned | {"gradient_accumulation_steps": accumulation}
        plan = packtool.plan(worlds[world].cache, world_size=world_size, **plan_options)
        sums: dict[int, float] = defaultdict(float)
        losses_by_step: dict[int, float] = defaultdict(float)
        for batch in packtool.Batches(plan, "all", **options, **HERE):
            outputs = model(**batch)
            assert outputs.loss is None
            sums[batch["targets"].step] += float(packtool.loss(outputs, batch)) / world_size
            losses_by_step[batch["targets"].step] += float(model(**batch, num_items_in_batch=1).loss)
        assert list(sums.values()) == pytest.approx(expected, rel=1e-5)
        assert list(losses_by_step.values()) == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_loss_from_all_logits_or_those_at_targets(model: PreTrainedModel, plan: packtool.Plan) -> None:
    batch = packtool.Batches(plan, **HERE)[0]
    target_logits = model(**batch).logits
    every = model(**{name: value for name, value in batch.items() if name != "logits_to_keep"}).logits
    assert target_logits.shape[1] == batch["targets"].num_targets < every.shape[1]
    assert float(packtool.loss(target_logits, batch)) == pytest.approx(float(packtool.loss(every, batch)), rel=1e-6)
    with pytest.raises(ValueError, match="do not belong to labels"):
        packtool.loss(every[:, :5], batch)


@torch.no_grad()
def test_padded_batches(tiny: TinyWorld, tmp_path: Path) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny.model)
    assert packtool.prepare_model(model, packing=False) is model
    options = {"packing": False, "per_device_train_batch_size": 3}
    expected = step_losses(model, tiny, options, tmp_path)
    batches = packtool.Batches(packtool.plan(tiny.cache, **options, packing_length=256), **HERE)
    assert [float(packtool.loss(model(**batch), batch)) for batch in batches] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_other_inputs_of_a_prepared_model(model: PreTrainedModel, tiny: TinyWorld) -> None:
    """Its own loss is there for inputs without targets; without boundaries they are refused."""
    tokens = torch.arange(12)[None]
    with pytest.raises(LeakError, match="cu_seq_lens_q"):
        model(input_ids=tokens)
    padded = packtool.prepare_model(transformers.AutoModelForImageTextToText.from_pretrained(tiny.model), packing=False)
    plain = transformers.AutoModelForImageTextToText.from_pretrained(tiny.model)
    loss, expected = (other(input_ids=tokens, labels=tokens).loss for other in (padded, plain))
    assert float(loss) == pytest.approx(float(expected))
    assert packtool.prepare_model(padded, packing=False).loss_function.args == (plain.loss_function,)


@torch.no_grad()
def test_adapters_are_added_after_prepare_model(plan: packtool.Plan, tiny: TinyWorld) -> None:
    """Whether a loop or a trainer asks; a new adapter changes nothing yet."""
    model = packtool.prepare_model(transformers.AutoModelForImageTextToText.from_pretrained(tiny.model))
    batch = packtool.Batches(plan, **HERE)[0]
    expected = float(packtool.loss(model(**batch), batch))
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert float(packtool.loss(adapted(**batch), batch)) == pytest.approx(expected)
    assert float(adapted(**batch, num_items_in_batch=1).loss) == pytest.approx(expected)
    with pytest.raises(ConfigError, match="this is a PeftModel"):
        packtool.prepare_model(adapted)


def test_unpackable_models_are_refused() -> None:
    config = transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16)
    with pytest.raises(UnsupportedModelError):
        packtool.prepare_model(transformers.MambaForCausalLM(config))
