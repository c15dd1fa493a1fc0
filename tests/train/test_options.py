"""Options under the names that users of ms-swift know: each does what it says, on a model of two layers."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.loop.checks import training_arguments
from packtool.train.model.load import load_model, resolve_dtype
from packtool.train.model.precision import loaded_dtype
from packtool.train.model.trainable import make_trainable
from packtool.train.prepare.result import settings_lines
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.train.tiny import TinyWorld, export_rows, read_metrics

LORA = {"train_type": "lora", "freeze_vit": True, "freeze_aligner": True}


def run_config(**settings: Any) -> TrainConfig:
    return TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)


def train_briefly(tiny: TinyWorld, output_dir: Path, **settings: Any) -> Any:
    return train(tiny.config(output_dir, **{"max_steps": 1, "verify_packing": False, **settings}), SilentProgress())


def reduced_config_of(tiny: TinyWorld) -> Any:
    return AutoConfig.from_pretrained(tiny.model)


def learning(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_optimizer_gets_the_requested_settings(tmp_path: Path) -> None:
    options = {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    options |= {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
    options |= {"warmup_steps": 7, "save_only_model": True, "ddp_timeout": 99, "neftune_noise_alpha": 5.0}
    run = TrainConfig(model="m", cached_dataset=("c",), output_dir=str(tmp_path), **options)
    args = training_arguments(run, num_steps=100, dtype=torch.float32, on_gpu=False)
    assert {name: getattr(args, name) for name in options} == options


def test_warmup_steps_take_precedence_over_the_ratio() -> None:
    assert run_config(warmup_ratio=0.03).num_warmup_steps(101) == 4
    assert run_config(warmup_steps=0, warmup_ratio=0.5).num_warmup_steps(101) == 0
    assert run_config(warmup_steps=30).num_warmup_steps(101) == 30
    assert run_config(warmup_ratio=0.03, max_warmup_steps=100).num_warmup_steps(10_000) == 100
    assert run_config(warmup_ratio=0.03, max_warmup_steps=100).num_warmup_steps(101) == 4


def test_schedule_ends_at_the_minimum_rate(tiny: TinyWorld, tmp_path: Path) -> None:
    schedule = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 4e-4}}
    train_briefly(tiny, tmp_path, max_steps=3, warmup_steps=1, optim="sgd", **schedule)
    rates = [line["learning_rate"] for line in read_metrics(tmp_path)]
    assert rates == pytest.approx([0.0, 1e-3, 7e-4])
    assert json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())["max_steps"] == 3


def test_adapter_has_the_requested_settings(tiny: TinyWorld, tmp_path: Path) -> None:
    options = {"lora_rank": 4, "use_rslora": True, "use_dora": True, "lora_bias": "all", "init_weights": "gaussian"}
    train_briefly(tiny, tmp_path, target_regex=r".*layers\.0\.self_attn\.[qv]_proj", **LORA, **options)
    saved = json.loads((tmp_path / "checkpoint-1" / "adapter_config.json").read_text())
    saved_values = [saved[name] for name in ("r", "use_rslora", "use_dora", "bias", "init_lora_weights")]
    assert saved_values == [4, True, True, "all", "gaussian"]
    weights = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    adapted = {name.split(".lora_")[0] for name in weights if ".lora_A" in name}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "v_proj"}
    assert all("layers.0." in name for name in adapted)
    assert any(name.endswith(".bias") for name in weights)


def test_training_continues_from_an_adapter(tiny: TinyWorld, tmp_path: Path) -> None:
    first_run = train_briefly(tiny, tmp_path / "first", lora_rank=4, **LORA)
    model: Any = load_model(tiny.model, reduced_config_of(tiny), dtype=torch.float32, packing=False)
    continued_config = tiny.config(
        tmp_path / "second", adapters=(str(first_run.checkpoint),), lora_rank=4, max_steps=1, **LORA
    )
    adapted = make_trainable(model, continued_config)
    saved = load_file(Path(first_run.checkpoint) / "adapter_model.safetensors")
    state = adapted.state_dict()
    for name, weight in saved.items():
        assert torch.equal(state[name.replace(".weight", ".default.weight")], weight)
    assert learning(adapted) == {name.replace(".weight", ".default.weight") for name in saved}
    result = train(continued_config, SilentProgress())
    assert result.num_trainable_parameters == first_run.num_trainable_parameters
    planned = tiny.config(tmp_path / "third", adapters=continued_config.adapters, dry_run=True, **LORA)
    assert train(planned, SilentProgress()).num_trainable_parameters == first_run.num_trainable_parameters
    for settings, message in (
        ({"lora_rank": 16}, "has 4"),
        ({"adapters": (str(tmp_path),)}, "this is not an adapter"),
        ({"adapters": (continued_config.output_dir,)}, f"whose last adapter is {continued_config.output_dir}"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_trainable(
                load_model(tiny.model, reduced_config_of(tiny), dtype=torch.float32, packing=False),
                tiny.config(tmp_path / "bad", **{"adapters": continued_config.adapters, **LORA, **settings}),
            )


@pytest.fixture(scope="module")
def with_val(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache with a val split."""
    cache = tmp_path_factory.mktemp("val") / "cache"
    export_rows(tiny, cache, split_dataset_ratio=0.3)
    return str(cache)


def eval_loss(output_dir: Path) -> float:
    return float([line["eval_loss"] for line in read_metrics(output_dir) if "eval_loss" in line][-1])


@pytest.mark.parametrize(
    "settings",
    [
        {"init_weights": "pissa"},
        {"init_weights": "olora"},
        {"modules_to_save": ("lm_head", "embed_tokens"), "init_weights": "orthogonal"},
        {"modules_to_save": ("embed_tokens",), "lora_bias": "all", "use_dora": True},
    ],
    ids=["pissa", "olora", "head-and-embeddings", "dora"],
)
def test_saved_weights_equal_the_trained_ones(
    tiny: TinyWorld, with_val: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Evaluated as it stood in memory and as it is loaded again, with peft alone too."""
    run = {**LORA, "cached_dataset": (with_val,), "eval_strategy": "steps", "max_steps": 2}
    result = train_briefly(tiny, tmp_path / "first", learning_rate=1e-2, **run, **settings)
    still = {**run, "adapters": (result.checkpoint,), "learning_rate": 0.0, "max_steps": 1, "eval_steps": 1}
    train_briefly(tiny, tmp_path / "again", **still)
    assert eval_loss(tmp_path / "again") == pytest.approx(eval_loss(tmp_path / "first"), abs=1e-5)
    base: Any = AutoModelForImageTextToText.from_pretrained(tiny.model)
    words = torch.arange(40).view(1, -1)
    before = base(input_ids=words).logits
    loaded_logits = PeftModel.from_pretrained(base, result.checkpoint).eval()(input_ids=words).logits
    inner = load_model(tiny.model, reduced_config_of(tiny), dtype=torch.float32, packing=False)
    here = make_trainable(inner, tiny.config(tmp_path, adapters=(result.checkpoint,), **LORA)).eval()
    assert torch.allclose(here(input_ids=words).logits, loaded_logits, atol=1e-5)
    assert (loaded_logits - before).abs().max() > 1e-3


@pytest.mark.parametrize("begin", ["pissa", "olora", "true", "gaussian"])
def test_new_adapters_do_not_change_the_output(tiny: TinyWorld, tmp_path: Path, begin: str) -> None:
    """Those that take part of the weights over leave the sum of both as it was, also when they are loaded."""
    config = tiny.config(tmp_path, init_weights=begin, **LORA)
    base: Any = load_model(tiny.model, reduced_config_of(tiny), dtype=torch.float32, packing=False)
    words = torch.arange(40).view(1, -1)
    before = base(input_ids=words).logits
    adapted = make_trainable(base, config).eval()
    assert torch.allclose(adapted(input_ids=words).logits, before, atol=1e-4)
    adapted.save_pretrained(tmp_path)
    fresh: Any = AutoModelForImageTextToText.from_pretrained(tiny.model)
    loaded = PeftModel.from_pretrained(fresh, str(tmp_path)).eval()
    assert torch.allclose(loaded(input_ids=words).logits, before, atol=1e-4)


def test_unmatched_module_names_are_reported() -> None:
    for settings, message in (
        ({"target_regex": "decoder.*"}, "--target-regex decoder"),
        ({"modules_to_save": ("wte",)}, "--modules-to-save wte"),
        ({"train_type": "full", "freeze_parameters": ("decoder",)}, "--freeze-parameters decoder"),
        ({"train_type": "full", "trainable_parameters_regex": "wq$"}, "--trainable-parameters-regex"),
        ({"train_type": "full", "freeze_parameters_ratio": 1.0}, "there is nothing to train"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_trainable(reduced_model("qwen3"), run_config(**settings))


def test_parameters_are_frozen_by_name_and_share() -> None:
    model = reduced_model("qwen3")
    names = [name for name, _ in model.named_parameters()]
    make_trainable(model, run_config(train_type="full", freeze_parameters=("model.layers.0.",)))
    assert learning(model) == {name for name in names if not name.startswith("model.layers.0.")}
    make_trainable(model, run_config(train_type="full", freeze_parameters_regex=r"norm"))
    assert learning(model) == {name for name in names if "norm" not in name}
    only = {"freeze_llm": True, "trainable_parameters_regex": r"layers\.1\..*q_proj"}
    make_trainable(model, run_config(train_type="full", **only))
    assert learning(model) == {name for name in names if "layers.1." in name and "q_proj" in name}
    make_trainable(model, run_config(train_type="full", freeze_parameters_ratio=0.5))
    sizes = [parameter.numel() for parameter in model.parameters()]
    num_frozen = sum(
        size for size, parameter in zip(sizes, model.parameters(), strict=True) if not parameter.requires_grad
    )
    assert 0 < num_frozen <= 0.5 * sum(sizes)
    assert next(iter(model.parameters())).requires_grad is False


def test_conflicting_options_are_reported() -> None:
    for settings, message in (
        ({"freeze_parameters": ("a",)}, "--freeze-parameters requires --train-type full"),
        ({"train_type": "full", "use_dora": True}, "--use-dora requires --train-type lora"),
        ({"adapters": ("a",), "init_weights": "pissa"}, "--init-weights pissa initializes new adapters"),
        ({"target_regex": "("}, "not a regular expression"),
        ({"bf16": True, "fp16": True}, "both set the precision"),
        ({"bf16": False, "torch_dtype": "bfloat16"}, "contradicts"),
        ({"bf16": True, "torch_dtype": "float16"}, "contradicts"),
        ({"lora_dropout": 1.0}, "--lora-dropout 1 drops every"),
        ({"load_best_model_at_end": True, "eval_strategy": "no"}, "requires evaluation"),
        ({"save_strategy": "best", "eval_strategy": "no"}, "requires evaluation"),
        ({"save_strategy": "best", "streaming": True}, "requires evaluation"),
        ({"metric_for_best_model": "bleu"}, "use loss"),
        ({"padding_free": True, "packing": False}, "requires --packing true"),
    ):
        problems = run_config(**settings).problems()
        assert any(message in problem for problem in problems), (settings, problems)


def test_vision_towers_may_keep_their_activations() -> None:
    def recomputing(**settings: Any) -> tuple[bool, bool]:
        model = make_trainable(reduced_model("qwen3_vl"), run_config(train_type="full", **settings))
        checkpointing: dict[bool, set[bool]] = {True: set(), False: set()}
        for name, module in model.named_modules():
            if type(module).__name__.endswith(("DecoderLayer", "VisionBlock")):
                checkpointing["visual" in name].add(bool(module.gradient_checkpointing))
        assert all(len(values) == 1 for values in checkpointing.values())
        return checkpointing[False].pop(), checkpointing[True].pop()

    assert recomputing() == (False, False)
    assert recomputing(gradient_checkpointing=True) == (True, True)
    assert recomputing(gradient_checkpointing=True, vit_gradient_checkpointing=False) == (True, False)
    assert recomputing(vit_gradient_checkpointing=True) == (False, True)


def test_the_precision_of_weights_and_of_computation() -> None:
    config = reduced_model("qwen3").config
    config.dtype = torch.bfloat16
    for settings, computation, weights in (
        ({}, torch.bfloat16, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16, torch.bfloat16),
        ({"bf16": True, "torch_dtype": "float32"}, torch.bfloat16, torch.float32),
        ({"bf16": False}, torch.float32, torch.float32),
        ({"fp16": True, "train_type": "full"}, torch.float16, torch.float32),
        ({"fp16": False}, torch.bfloat16, torch.bfloat16),
        ({"torch_dtype": "float32"}, torch.float32, torch.float32),
    ):
        run = run_config(**settings)
        dtype = resolve_dtype(config, run, on_gpu=True)
        assert (dtype, loaded_dtype(dtype, config, run)) == (computation, weights), settings


def test_bf16_with_weights_in_float32(tiny: TinyWorld, tmp_path: Path) -> None:
    result = train_briefly(tiny, tmp_path / "mixed", bf16=True, torch_dtype="float32")
    weights = load_file(Path(result.checkpoint) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    exact = train_briefly(tiny, tmp_path / "exact")
    assert result.last_loss == pytest.approx(exact.last_loss, rel=2e-2)
    assert result.last_loss != exact.last_loss


def checkpoints(output_dir: Path) -> list[str]:
    return sorted(path.name for path in output_dir.glob("checkpoint-*"))


def test_when_checkpoints_are_saved(tiny: TinyWorld, tmp_path: Path) -> None:
    result = train_briefly(tiny, tmp_path / "epoch", max_steps=None, num_train_epochs=2, save_strategy="epoch")
    each = result.steps // 2
    assert checkpoints(tmp_path / "epoch") == sorted([f"checkpoint-{each}", f"checkpoint-{2 * each}"])
    result = train_briefly(tiny, tmp_path / "no", save_strategy="no")
    assert (result.checkpoint, checkpoints(tmp_path / "no")) == (None, [])
    result = train_briefly(tiny, tmp_path / "only", save_only_model=True)
    names = {path.name for path in Path(result.checkpoint).iterdir()}
    assert "model.safetensors" in names
    assert not names & {"optimizer.pt", "scheduler.pt"}


def test_the_best_evaluation_is_saved_and_kept(tiny: TinyWorld, with_val: str, tmp_path: Path) -> None:
    """At a rate that only does harm the first evaluation is the best one; more accuracy is better, more loss is not."""
    worse = {"cached_dataset": (with_val,), "learning_rate": 0.5, "lr_scheduler_type": "constant"}
    worse |= {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "warmup_ratio": 0.0, "optim": "sgd"}
    result = train_briefly(tiny, tmp_path / "best", save_strategy="best", **worse)
    losses = [line["eval_loss"] for line in read_metrics(tmp_path / "best") if "eval_loss" in line]
    best = losses.index(min(losses)) + 1
    assert result.checkpoint == str(tmp_path / "best" / f"checkpoint-{best}")
    limited = {"load_best_model_at_end": True, "save_steps": 1, "save_total_limit": 1}
    limited |= {"metric_for_best_model": "loss", "greater_is_better": True}
    result = train_briefly(tiny, tmp_path / "kept", **worse, **limited)
    worst = losses.index(max(losses)) + 1
    assert result.checkpoint == str(tmp_path / "kept" / f"checkpoint-{worst}")
    assert set(checkpoints(tmp_path / "kept")) == {f"checkpoint-{worst}", "checkpoint-3"}


def test_early_stopping_ends_a_run(tiny: TinyWorld, with_val: str, tmp_path: Path) -> None:
    """More loss is said to be better here, so the first evaluation is the best; a resumed run counts on."""
    worse: dict[str, Any] = {"cached_dataset": (with_val,), "greater_is_better": True, "learning_rate": 0.1}
    worse |= {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 5, "optim": "sgd"}
    worse |= {"save_steps": 2, "verify_packing": False, "early_stop_interval": 2}
    progress = Lines()
    result = train(tiny.config(tmp_path, **worse), progress)
    assert (result.steps, result.checkpoint) == (3, str(tmp_path / "checkpoint-3"))
    assert any("ended early after step 3 of 5: eval_loss was best after step 1" in note for note in progress.notes)
    shutil.rmtree(tmp_path / "checkpoint-3")
    result = train_briefly(tiny, tmp_path, **worse, resume_from_checkpoint="true")
    assert (result.resumed_from, result.steps) == (str(tmp_path / "checkpoint-2"), 3)


def test_settings_are_shown_as_typed() -> None:
    run = run_config(lr_scheduler_kwargs={"min_lr": 1e-6}, training={"tf32": True, "run_name": "a b"})
    (line,) = settings_lines(run)
    assert """--lr-scheduler-kwargs '{"min_lr": 1e-06}'""" in line
    assert "--set training.tf32=true" in line
    assert "--set 'training.run_name=\"a b\"'" in line


class Lines(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.num_silent = 0
        self.shown: list[tuple[int, dict[str, Any]]] = []  # steps done, and the figures shown with them

    def line(self, num_done: int = 0, **fields: float | int | str) -> None:
        self.lines.append({"num_done": num_done, **fields})
        self._show(num_done, fields)

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        self.num_silent += num_done
        self._show(num_done, fields)

    def _show(self, num_done: int, fields: dict[str, Any]) -> None:
        self.shown.append(((self.shown[-1][0] if self.shown else 0) + num_done, fields))

    def note(self, message: str) -> None:
        self.notes.append(message)


def test_every_log_line_is_shown(tiny: TinyWorld, tmp_path: Path) -> None:
    progress = Lines()
    train(tiny.config(tmp_path, max_steps=3, logging_steps=1, verify_packing=False), progress)
    assert [line["loss"] for line in progress.lines] == [round(line["loss"], 4) for line in read_metrics(tmp_path)]
    assert [line.pop("num_done") for line in progress.lines] == [1, 1, 1], "one line a step"
    assert progress.num_silent == 0
    explained = [line.split("  ")[1] for line in progress.notes if line.startswith("  ")]
    assert explained == list(progress.lines[0]), "each is explained, once"


@pytest.mark.parametrize(
    "settings",
    [
        {"logging_steps": 2},
        {"logging_steps": 4, "enable_channel_loss": True, "loss_reduction": "sample"},
    ],
)
def test_each_line_shows_the_figures_of_its_own_step(settings: dict[str, Any], tiny: TinyWorld, tmp_path: Path) -> None:
    progress = Lines()
    train(tiny.config(tmp_path, max_steps=6, **settings), progress)
    logged = {line["step"]: line for line in read_metrics(tmp_path)}
    assert [step for step, _ in progress.shown] == [1, 2, 3, 4, 5, 6]
    for step, fields in progress.shown:
        assert bool(fields) == (step in logged)
        for name in ("loss", "objective"):
            assert fields.get(name) == pytest.approx(logged.get(step, {}).get(name), abs=1e-4)
        if fields:
            assert fields["epoch"] == f"{logged[step]['epoch']:.2f}"
            channels = f"none {logged[step]['loss_none']:.4g}" if "loss_none" in logged[step] else None
            assert fields.get("loss by channel") == channels
    assert sum("objective" in note for note in progress.notes) == ("loss_reduction" in settings), "explained once"


@pytest.mark.parametrize("streaming", [False, True])
def test_debug_log_describes_each_batch(
    tiny: TinyWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture, streaming: bool
) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 2}
    settings |= tiny.streamed() | {"max_steps": 2} if streaming else {}
    with caplog.at_level(logging.DEBUG, logger="packtool.train.batches"):
        train_briefly(tiny, tmp_path, **settings)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        f"rank 0, step {step}, micro-batch {micro_batch} of 2" for step in (1, 2) for micro_batch in (1, 2)
    ]
    for line in lines:
        assert "samples " in line
        assert "input_ids (1, " in line
        assert "lengths " in line
    assert any("pixel_values" in line for line in lines)
