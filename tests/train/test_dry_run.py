"""``--dry-run`` accepts what the run accepts and refuses what it refuses, with the same words."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from packtool.errors import ConfigError, PacktoolError, raise_together
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.loop import execute
from packtool.train.loop.checks import checks_without_rows
from packtool.train.run import train
from tests.train.test_run import Recording
from tests.train.tiny import TinyWorld

# Of each setting: values that can be, and values that cannot.
CHOICES: dict[str, list[Any]] = {
    "optim": ["adamw_torch", "adafactor", "galore_adamw", "lomo", "adamw_bnb_8bit"],
    "lr_scheduler_type": ["linear", "cosine_with_restarts", "cosin", "reduce_lr_on_plateau"],
    "report_to": [(), ("none",), ("foo",), ("tensorboard",), ("wandb",)],
    "deepspeed": [None, "nofile.json", "zero2", "zero1_offload"],
    "fsdp": [(), ("full_shard",)],
    "use_liger_kernel": [False, True],
    "torch_dtype": ["auto", "bfloat16", "float16"],
    "attn_impl": ["auto", "sdpa", "flash_attention_2", "varlen"],
    "train_type": ["full", "lora"],
    "target_modules": [("all-linear",), ("q_proj",), ("nothing",)],
    "vit_lr": [None, 1e-4],
    "packing_length": [128, 64],
    "max_length": [None, 60],
    "training": [
        *({}, {"neftune_noise": 5}, {"neftune_noise_alpha": 5.0}, {"adam_epsilon": "x"}, {"optim": "adamw"}),
        *({"optim": "sgd"}, {"lr_scheduler_kwargs": {"foo": 1}}, {"warmup_steps": -1}, {"adam_beta1": 2.0}),
    ],
}


def outcome(tiny: TinyWorld, output_dir: Path, options: dict[str, Any]) -> str:
    """What came of it: nothing, or the error."""
    try:
        train(tiny.config(output_dir, max_steps=1, **options), SilentProgress())
    except PacktoolError as error:
        return repr(error)
    return "accepted"


@st.composite
def settings_of_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Most of them left as they are, so that more than one in two can be carried out."""
    names = draw(st.lists(st.sampled_from(sorted(CHOICES)), unique=True, max_size=3))
    return {name: draw(st.sampled_from(CHOICES[name])) for name in names}


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(settings_of_runs())
@example({"lr_scheduler_type": "cosin"})
@example({"report_to": ("foo",)})
@example({"deepspeed": "nofile.json"})
@example({"training": {"neftune_noise": 5}})
@example({"use_liger_kernel": True})
@example({"optim": "galore_adamw"})
@example({"lr_scheduler_type": "greedy"})
@example({"training": {"lr_scheduler_kwargs": {"foo": 1}}})
def test_dry_run_and_run_report_the_same_errors(tiny: TinyWorld, options: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as output_dir:
        planned = outcome(tiny, Path(output_dir), options | {"dry_run": True})
        assert outcome(tiny, Path(output_dir), options) == planned


def test_cpu_machine_plans_for_remote_gpus(tiny: TinyWorld, tmp_path: Path) -> None:
    def plan(**options: Any) -> str:
        progress = Recording()
        train(tiny.config(tmp_path, dry_run=True, **options), progress, World(0, 8))
        return progress.notes[-1]

    for dtype in ("bfloat16", "float16"):
        notes = plan(hardware="h100", attn_impl="flash_attention_2", torch_dtype=dtype, fsdp=("full_shard",))
        assert "planned for H100" in notes
    assert "this will not fit" in plan(hardware="a100", dynamic_batch_tokens=10**9, packing=False)
    for invalid_options, message in (
        ({"hardware": "h100", "attn_impl": "varlen", "torch_dtype": "float32"}, "computes in bfloat16 or float16"),
        ({"hardware": "h1000"}, "neither h100"),
        ({"attn_impl": "flash_attention_2"}, "--attn-impl flash_attention_2"),
        ({"torch_dtype": "float16"}, "float16 needs a GPU"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(**invalid_options)


def test_run_on_a_gpu_reports_the_planned_memory(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_notes = []
    monkeypatch.setattr(execute, "_estimates_memory", lambda: True)
    monkeypatch.setattr(execute, "resolve_dtype", lambda *_, **__: torch.float32)
    for dry_run in (True, False):
        progress = Recording()
        train(tiny.config(tmp_path, max_steps=1, dry_run=dry_run, verify_packing=False), progress)
        memory_notes.append([note for note in progress.notes if "memory of a rank" in note])
    assert memory_notes[0] == memory_notes[1]
    assert len(memory_notes[0]) == 1


@pytest.mark.parametrize("settings", [{"train_type": "lora", "bf16": True}, {"torch_dtype": "bfloat16"}])
def test_dry_run_reports_the_precision_of_the_run(tiny: TinyWorld, tmp_path: Path, settings: dict[str, Any]) -> None:
    precision_notes = []
    for dry_run in (True, False):
        progress = Recording()
        train(tiny.config(tmp_path, max_steps=1, dry_run=dry_run, verify_packing=False, **settings), progress)
        precision_notes.append(
            [note for note in progress.notes if note.startswith(("trained weights: ", "parameters: "))]
        )
    assert precision_notes[0] == precision_notes[1]
    assert len(precision_notes[0]) == 2


def test_log_reports_the_effective_batch_size(tiny: TinyWorld, tmp_path: Path) -> None:
    def plan(**options: Any) -> str:
        progress = Recording()
        train(tiny.config(tmp_path, dry_run=True, **options), progress, World(0, 2))
        return "\n".join(progress.notes)

    # Two packs of five samples on each of two ranks; without packing, two rows on each.
    notes = plan(gradient_accumulation_steps=2)
    assert "a step has 20.0 samples and 110 target tokens on average" in notes
    assert (
        "(batch size x accumulation x ranks: 1 x 2 x 2) it has 4 and 22: --samples-per-step 4 keeps that batch" in notes
    )
    assert "5.0 times the batch: multiply a learning rate tuned without packing by up to 2.2 with Adam" in notes
    assert "warm-up: 1 of 2 steps, unpacked 1 of 10" in notes
    assert "warm-up: 4 of 2 steps, unpacked 4 of 10" in plan(gradient_accumulation_steps=2, warmup_steps=4)
    assert "5.0 with SGD (linear: Goyal et al. 2017)" in plan(gradient_accumulation_steps=2, optim="sgd")
    for options in ({"samples_per_step": 4}, {"packing": False}):
        notes = plan(**options)
        assert "a step has" not in notes
        assert "tuned" not in notes
    assert "optimizer steps: 10, as without packing; each has the 4 samples that it has without packing" in plan(
        samples_per_step=4
    )


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"asft_alpha": 0.1}, "--asft-alpha"),
        ({"router_aux_loss_coef": 0.1}, "--router-aux-loss-coef"),
        ({"train_from_scratch": True}, "--train-from-scratch true"),
    ],
)
def test_zero3_in_a_file_is_refused_like_its_name(
    tiny: TinyWorld, tmp_path: Path, settings: dict[str, Any], option: str
) -> None:
    file = tmp_path / "deepspeed.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    config = tiny.config(tmp_path / "out", deepspeed=str(file), **settings)
    with pytest.raises(ConfigError, match=f"{option} cannot be combined with ZeRO-3"):
        raise_together(checks_without_rows(config))
