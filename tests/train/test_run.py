"""A run from caches to checkpoint: figures, files, filters, and what stops it before it starts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

import packtool
from packtool.cache.manifest import Manifest
from packtool.cache.plan_file import read_plan, write_plan
from packtool.config.settings import resolve
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, DataError, MismatchError, UnsupportedModelError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.report.inspect import sample_view
from packtool.report.tables import train_lines
from packtool.train.prepare.caches import packs_of
from packtool.train.prepare.history import replay_segment, segments_of
from packtool.train.prepare.output_dir import RESULT_NAME
from packtool.train.prepare.trained import TrainedModel
from packtool.train.run import train
from tests.train.tiny import TinyWorld, export_rows, make_tiny_text_world, read_metrics


class Recording(SilentProgress):
    """Records notes, lines and figures."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.total: int | None = None
        self.num_done = 0
        self.fields: dict[str, Any] = {}

    def start(self, title: str, total: int | None) -> None:
        self.total = total

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        self.num_done += num_done
        self.fields = fields

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def full_run(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Recording]:
    """Three epochs of three steps, the last of them smaller."""
    output_dir, progress = tmp_path_factory.mktemp("trained"), Recording()
    config = tiny.config(output_dir, num_train_epochs=3.0, gradient_accumulation_steps=3, logging_steps=2)
    return output_dir, train(config, progress), progress


@pytest.mark.smoke
def test_figures_add_up(full_run: tuple[Path, Any, Recording], tiny: TinyWorld) -> None:
    output_dir, result, _ = full_run
    assert (result.num_samples, result.filtered, result.num_packs) == (40, 0, 8)
    assert result.samples_per_pack == 5.0
    assert 0.9 < result.fill <= 1.0
    assert (result.steps, result.steps_without_packing, result.num_empty_micro_batches) == (9, 42, 0)
    assert result.target_tokens_per_second == pytest.approx(result.target_tokens / result.seconds)
    assert result.target_tokens == sum(line["target_tokens"] for line in read_metrics(output_dir))
    assert 0 < result.num_trainable_parameters == result.num_parameters
    assert json.loads((output_dir / RESULT_NAME).read_text()) == dataclasses.asdict(result)
    assert result.checkpoint == str(output_dir / "checkpoint-9")


def test_loss_falls_and_first_and_last_step_are_logged(full_run: tuple[Path, Any, Recording]) -> None:
    output_dir, result, _ = full_run
    lines = read_metrics(output_dir)
    assert [line["step"] for line in lines] == [1, 2, 4, 6, 8, 9]
    assert [line["epoch"] for line in lines] == pytest.approx([step / 3 for step in (1, 2, 4, 6, 8, 9)])
    assert result.first_loss == lines[0]["loss"]
    assert result.last_loss == lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert all({"grad_norm", "learning_rate"} <= line.keys() for line in lines)


def test_progress_gets_the_plan_and_every_step(full_run: tuple[Path, Any, Recording]) -> None:
    _, _, progress = full_run
    assert progress.total == progress.num_done == 9
    assert {"epoch", "loss", "grad norm", "lr", "tokens/s", "samples/s", "fill", "waiting", "memory"} == (
        progress.fields.keys()
    )
    notes = "\n".join(progress.notes)
    for text in ("samples in the caches: 40", "packing length: 256", "packs: 8", "5.00 samples a pack", "1 process"):
        assert text in notes
    assert "9 with packing, 42 with one sample per row" in notes
    assert "packs per step: 3; in the last step of an epoch: 2" in notes


def test_logged_loss_is_the_mean_over_all_targets_since_the_last_line(tiny: TinyWorld, tmp_path: Path) -> None:
    for steps in (1, 4):
        config = tiny.config(tmp_path / str(steps), gradient_accumulation_steps=2, logging_steps=steps)
        train(config, SilentProgress())
    singly, together = read_metrics(tmp_path / "1"), read_metrics(tmp_path / "4")
    assert [line["step"] for line in together] == [1, 4]
    targets = [line["target_tokens"] for line in singly[1:]]
    mean = sum(line["loss"] * num for line, num in zip(singly[1:], targets, strict=True)) / sum(targets)
    assert together[1]["loss"] == pytest.approx(mean, rel=1e-6)
    assert together[1]["target_tokens"] == sum(targets)


def test_a_full_checkpoint_loads_with_transformers_alone(
    full_run: tuple[Path, Any, Recording], tiny: TinyWorld
) -> None:
    checkpoint = full_run[1].checkpoint
    model = AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert model.config._attn_implementation == "sdpa"
    AutoProcessor.from_pretrained(checkpoint)
    before, after = (json.loads((Path(folder) / "config.json").read_text()) for folder in (tiny.model, checkpoint))
    for config in (before, after):
        for part in ("text_config", "vision_config"):
            config[part].pop("dtype", None)
    # Neither the attention nor the cache switched off for training goes along.
    assert before == after
    with torch.no_grad():
        out = model.generate(torch.arange(5).unsqueeze(0), max_new_tokens=3)
    assert out.shape[1] > 5


def test_an_adapter_loads_with_peft_alone(tiny: TinyWorld, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"train_type": "lora", "learning_rate": 1e-2, "gradient_accumulation_steps": 4}
    result = train(tiny.config(tmp_path, **settings, freeze_vit=True, freeze_aligner=True), SilentProgress())
    assert 0 < result.num_trainable_parameters < result.num_parameters
    base = AutoModelForImageTextToText.from_pretrained(tiny.model)
    model = PeftModel.from_pretrained(base, result.checkpoint)
    adapted = {name for name, parameter in model.named_parameters() if "lora_B" in name and parameter.any()}
    assert adapted
    assert not [name for name in adapted if "visual" in name or "lm_head" in name]
    AutoProcessor.from_pretrained(result.checkpoint)


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_a_model_of_text_alone(train_type: str, tmp_path: Path) -> None:
    """With and without packing the first step has the same loss; freezing what it does not have is no error."""
    text = make_tiny_text_world(tmp_path)
    losses = []
    for packing in (True, False):
        settings = {"train_type": train_type, "packing": packing, "per_device_train_batch_size": 20, "max_steps": 2}
        settings |= {"freeze_vit": True, "freeze_aligner": True, "gradient_checkpointing": True, "lora_dropout": 0.0}
        output_dir = tmp_path / f"out-{packing}"
        result = train(text.config(output_dir, **settings), SilentProgress())
        assert result.num_samples == 14
        losses.append([line["loss"] for line in read_metrics(output_dir)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_longer_samples_are_filtered_and_counted(tiny: TinyWorld, tmp_path: Path) -> None:
    progress = Recording()
    result = train(tiny.config(tmp_path, max_length=60, packing_length=60, max_steps=1), progress)
    assert result.filtered > 0
    assert result.num_samples + result.filtered == 40
    assert (result.max_length, result.packing_length) == (60, 60)
    assert f"{result.filtered} longer than 60 tokens are left out" in "\n".join(progress.notes)


def test_partial_plan_is_reported(tiny: TinyWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "some.plan")
    packtool.plan(tiny.cache, packing_length=256).save(path)
    saved = read_plan(path)
    end = int(saved.offsets[3])
    partial_plan = dataclasses.replace(
        saved, samples=saved.samples[:end], offsets=saved.offsets[:4], lengths=saved.lengths[:end], locations=None
    )
    write_plan(path, dataclasses.replace(partial_plan, plan=packs_of(partial_plan).fingerprint))
    progress = Recording()
    result = train(tiny.config(tmp_path / "out", plan=path, dry_run=True), progress)
    assert result.filtered == 40 - end > 0
    assert f"{40 - end} that are not in --plan {path} are left out" in "\n".join(progress.notes)
    assert ("  not in the plan", f"{40 - end}") in train_lines(result, has_plan=True)


def test_changed_plan_is_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    """By a run that goes on, and by who looks at its steps: its history knows the packs by their fingerprint."""
    path, out = tmp_path / "a.plan", str(tmp_path / "out")
    packtool.plan(tiny.cache, packing_length=256).save(str(path))
    settings: dict[str, Any] = {"plan": str(path), "max_steps": 1, "verify_packing": False}
    train(tiny.config(out, **settings), SilentProgress())
    ((segment, stop),) = segments_of(out)
    assert replay_segment(out, segment, stop).timeline.locate(0)[1] == 0
    packtool.plan(tiny.cache, packing_length=256, seed=7).save(str(path))
    with pytest.raises(MismatchError, match=r"a\.plan, the --plan of .*out, has changed since training"):
        replay_segment(out, segment, stop)
    with pytest.raises(MismatchError, match=r"(?s)other data or settings:.*depend on .*--plan"):
        train(tiny.config(out, **settings, resume_from_checkpoint="true"), SilentProgress())
    path.unlink()
    with pytest.raises(MismatchError, match="the --plan of this run is missing"):
        replay_segment(out, segment, stop)


def test_several_caches_are_joined(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, cached_dataset=(tiny.cache, tiny.cache + "/train"), dry_run=True)
    assert train(config, SilentProgress()).num_samples == 80


@pytest.mark.parametrize(
    ("epochs", "max_steps", "steps"), [(0.5, None, 4), (2.25, None, 18), (9.0, 3, 3), (1.0, 20, 20)]
)
def test_the_number_of_steps(epochs: float, max_steps: int | None, steps: int, tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, num_train_epochs=epochs, max_steps=max_steps, dry_run=True)
    assert train(config, SilentProgress()).steps == steps


def test_a_dry_run_plans_for_any_number_of_processes_and_writes_nothing(tiny: TinyWorld, tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    result = train(tiny.config(output_dir, dry_run=True), SilentProgress(), World(0, 3))
    assert (result.num_processes, result.steps, result.num_empty_micro_batches) == (3, 3, 1)
    assert result.checkpoint is result.last_loss is None
    assert not output_dir.exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_missing_image_stops_the_run_and_is_named(workers: int, tiny: TinyWorld, tmp_path: Path) -> None:
    rows = shutil.copytree(Path(tiny.rows).parent, tmp_path / "rows")
    moved = dataclasses.replace(tiny, rows=str(rows / "train.json"), cache=str(tmp_path / "cache"))
    export_rows(moved, moved.cache)
    (rows / "pictures" / "0003.png").unlink()
    config = moved.config(tmp_path / "out", packing_length=128, dataloader_num_workers=workers)
    with pytest.raises(DataError, match=r"0003\.png") as exc_info:
        train(config, SilentProgress())
    assert "Traceback" not in str(exc_info.value)
    assert exc_info.value.remedy


def test_a_model_that_would_leak_is_refused_before_it_is_loaded(tiny: TinyWorld, tmp_path: Path) -> None:
    model = shutil.copytree(tiny.model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["layer_types"] = ["linear_attention", "full_attention"]
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        train(tiny.config(tmp_path / "out", model=str(model), dry_run=True), SilentProgress())


def test_bfloat16_on_the_cpu_if_requested(tiny: TinyWorld, tmp_path: Path) -> None:
    result = train(tiny.config(tmp_path, torch_dtype="bfloat16", max_steps=1), SilentProgress())
    weights = load_file(Path(str(result.checkpoint)) / "model.safetensors")
    # Computed in bfloat16, kept and saved as the model was.
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert not all(torch.equal(weight.bfloat16().float(), weight) for weight in weights.values())
    assert result.last_loss is not None
    assert 3 < result.last_loss < 12
    with pytest.raises(ConfigError, match="float16 needs a GPU"):
        train(tiny.config(tmp_path / "half", torch_dtype="float16"), SilentProgress())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training": {"label_smoothing_factor": 0.1}}, r"training\.label_smoothing_factor"),
        ({"training": {"dataloader_drop_last": True}}, r"training\.dataloader_drop_last"),
        ({"training": {"no_such_thing": 1}}, "no_such_thing"),
        ({"lr_scheduler_type": "zigzag"}, "zigzag"),
    ],
)
def test_contradictory_settings_are_refused(
    settings: dict[str, Any], message: str, tiny: TinyWorld, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tiny.config(tmp_path, **settings), SilentProgress())


def test_settings_of_transformers_pass_through(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, max_steps=1, training={"optim": "adafactor", "adam_beta2": 0.95})
    train(config, SilentProgress())
    args = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert (args.optim, args.adam_beta2) == ("adafactor", 0.95)


def test_model_parts_have_separate_learning_rates(tiny: TinyWorld, tmp_path: Path) -> None:
    """With a rate of nothing a part stays as it was; with adapters, too."""
    before = load_file(Path(tiny.model) / "model.safetensors")
    run_options: dict[str, Any] = {"vit_lr": 0.0, "aligner_lr": 1e-2, "learning_rate": 1e-3, "warmup_ratio": 0.0}
    train(tiny.config(tmp_path / "full", max_steps=1, weight_decay=0.0, **run_options), SilentProgress())
    after = load_file(tmp_path / "full" / "checkpoint-1" / "model.safetensors")
    moved = {name: float((weight - before[name]).abs().max()) for name, weight in after.items()}
    aligner = [name for name in moved if "merger" in name]
    vision = [name for name in moved if "visual" in name and name not in aligner]
    assert aligner
    assert vision
    # Adam's first step is as large as the rate.
    assert max(moved[name] for name in vision) == 0.0
    assert max(moved[name] for name in aligner) == pytest.approx(1e-2, rel=0.01)
    others = max(moved[name] for name in moved if name not in vision + aligner)
    assert others == pytest.approx(1e-3, rel=0.01)
    config = tiny.config(tmp_path / "lora", max_steps=2, train_type="lora", **run_options)
    train(config, SilentProgress())
    adapters = load_file(tmp_path / "lora" / "checkpoint-2" / "adapter_model.safetensors")
    halves = {name: weight.abs().max() for name, weight in adapters.items() if "lora_B" in name}
    assert all((value > 0) == ("visual" not in name or "merger" in name) for name, value in halves.items())


def test_lora_plus_and_dynamic_fine_tuning(tiny: TinyWorld, tmp_path: Path) -> None:
    options: dict[str, Any] = {"learning_rate": 1e-3, "warmup_ratio": 0.0, "weight_decay": 0.0, "train_type": "lora"}
    config = tiny.config(tmp_path, max_steps=1, lorap_lr_ratio=8.0, enable_dft_loss=True, **options)
    train(config, SilentProgress())
    adapters = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    # B starts at zero, and Adam's first step is as large as the rate.
    moved = max(float(weight.abs().max()) for name, weight in adapters.items() if "lora_B" in name)
    assert moved == pytest.approx(8e-3, rel=0.01)
    (line,) = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 0 < line["objective"] < line["loss"]  # each loss times its probability


def test_log_lines_describe_their_steps(tiny: TinyWorld, tmp_path: Path) -> None:
    train(tiny.config(tmp_path, enable_channel_loss=True, max_steps=3), SilentProgress())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["tokens"] <= 256
        assert line["fill"] == pytest.approx(line["tokens"] / 256)
        assert 0 < line["efficient_attn_ratio"] < 1
        assert 0 <= line["data_wait"] < 1
        assert 0 < line["log_wait"] < 1
        assert "copy_wait" not in line
        assert line["memory_gib"] > 0
        assert line["loss_none"] == pytest.approx(line["loss"], rel=1e-5)
        assert 0 <= line["token_accuracy"] == line["token_accuracy_none"] <= 1


def test_sample_reduction_weights_samples_equally(tiny: TinyWorld, tmp_path: Path) -> None:
    """The same step packed, padded and accumulated, and another one than the mean over tokens."""
    run_options: dict[str, Any] = {"loss_reduction": "sample", "max_steps": 1, "learning_rate": 1e-3}
    kinds: dict[str, dict[str, Any]] = {
        "padded": {"packing": False, "per_device_train_batch_size": 40},
        "packed": {"gradient_accumulation_steps": 8},
        "tokens": {"gradient_accumulation_steps": 8, "loss_reduction": "token"},
    }
    for name, settings in kinds.items():
        train(tiny.config(tmp_path / name, **run_options | settings), SilentProgress())
    (padded,), (packed,), (tokens,) = (read_metrics(tmp_path / name) for name in kinds)
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-5)
    assert packed["grad_norm"] == pytest.approx(padded["grad_norm"], rel=1e-4)
    assert packed["objective"] == pytest.approx(padded["objective"], rel=1e-5)
    assert packed["objective"] != pytest.approx(tokens["loss"], rel=1e-3)
    assert packed["loss"] == pytest.approx(tokens["loss"], rel=1e-5), "the mean over target tokens"
    assert "objective" not in tokens


def test_relabeling_needs_no_new_export(tiny: TinyWorld, tmp_path: Path) -> None:
    """``--loss-scale`` of a run on a cache that has all turns is that of a cache that was exported so."""
    export_rows(tiny, tmp_path / "cache", loss_scale="last_round")
    exported = train(tiny.config(tmp_path / "a", cached_dataset=(str(tmp_path / "cache"),)), SilentProgress())
    relabeled = train(tiny.config(tmp_path / "b", loss_scale="last_round"), SilentProgress())
    assert exported.target_tokens == relabeled.target_tokens
    assert read_metrics(tmp_path / "a")[-1]["loss"] == pytest.approx(read_metrics(tmp_path / "b")[-1]["loss"], rel=1e-4)
    everything = train(tiny.config(tmp_path / "c", loss_scale="all", dry_run=True), SilentProgress())
    assert everything.target_tokens > relabeled.target_tokens
    with pytest.raises(MismatchError, match="weights differently"):
        train(tiny.config(tmp_path / "d", loss_scale="last_round+react"), SilentProgress())
    with pytest.raises(MismatchError, match="--truncation-strategy delete, but this run sets left"):
        train(tiny.config(tmp_path / "d", truncation_strategy="left"), SilentProgress())
    with pytest.raises(MismatchError, match="--min-length 0, but this run sets 9"):
        train(tiny.config(tmp_path / "d", min_length=9), SilentProgress())
    with pytest.raises(MismatchError, match=r"without --norm-bbox, but this run sets none(.|\n)* --norm-bbox none"):
        train(tiny.config(tmp_path / "d", norm_bbox="none"), SilentProgress())


def test_evaluations_do_not_change_training(tiny: TinyWorld, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "cache", split_dataset_ratio=0.2)
    run_options: dict[str, Any] = {
        "cached_dataset": (str(tmp_path / "cache"),),
        "num_train_epochs": 2.0,
        "train_type": "lora",
    }
    train(tiny.config(tmp_path / "plain", **run_options, eval_strategy="no"), SilentProgress())
    for strategy, every in (("steps", 2), ("epoch", 0)):
        output_dir = tmp_path / strategy
        train(tiny.config(output_dir, **run_options, eval_strategy=strategy, eval_steps=every or 1), SilentProgress())
        lines = read_metrics(output_dir)
        assert [line for line in lines if "loss" in line] == read_metrics(tmp_path / "plain")
        evaluated = [line for line in lines if "eval_loss" in line]
        num_steps = len(lines) - len(evaluated)
        each = every or num_steps // 2
        expected = sorted({*range(each, num_steps + 1, each), num_steps})
        assert [line["step"] for line in evaluated] == expected
        assert all(line["eval_samples"] == 8 for line in evaluated)
        assert evaluated[0]["eval_loss"] != evaluated[-1]["eval_loss"]
    with pytest.raises(MismatchError, match="no val split"):
        train(tiny.config(tmp_path / "none", eval_strategy="epoch"), SilentProgress())


def test_packing_length_is_checked_against_existing_samples(tiny: TinyWorld, tmp_path: Path) -> None:
    longest = 82
    config = tiny.config(tmp_path, max_length=10240, packing_length=longest, dry_run=True)
    assert train(config, SilentProgress()).packing_length == longest
    with pytest.raises(DataError, match=r"1 of 40 samples are longer than a pack of 81 tokens; the longest has 82"):
        train(dataclasses.replace(config, packing_length=longest - 1), SilentProgress())
    with pytest.raises(ConfigError, match="a sample could be longer than a pack"):
        resolve(TrainConfig, {**vars(config), **tiny.streamed(), "max_length": 100, "training": None})


def test_models_are_found_from_any_directory(tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shutil.copytree(tiny.model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    near = dataclasses.replace(tiny, model="model", cache="cache")
    export_rows(near, "cache")
    manifest, elsewhere = Manifest.read("cache"), Manifest.read(tiny.cache)
    assert manifest.identity.spec["model"] == str(model)
    assert manifest.fingerprint == elsewhere.fingerprint
    train(near.config("out", train_type="lora", max_steps=1), SilentProgress())
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert TrainedModel.find("../out/checkpoint-1") == TrainedModel(str(model), "../out/checkpoint-1")
    assert sample_view("../cache", "train", 0, None)[0]
    model.rename(tmp_path / "moved")
    with pytest.raises(MismatchError, match="does not exist") as exc_info:
        TrainedModel.find("../out/checkpoint-1")
    assert "--base-model DIR" in str(exc_info.value.remedy)
    assert TrainedModel.find("../out/checkpoint-1", "../moved").base == "../moved"
    with pytest.raises(ConfigError, match="is not an adapter"):
        TrainedModel.find("../moved", "../moved")
    with pytest.raises(ConfigError, match="was exported for") as refused:
        sample_view("../cache", "train", 0, None)
    assert "--model DIR" in str(refused.value.remedy)
