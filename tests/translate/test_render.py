"""The report at startup, and the YAML and commands that ``packtool translate`` prints."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.cli.main import run
from packtool.config.settings import parse_yaml
from packtool.errors import EXIT_OK, EXIT_USAGE
from packtool.translate.read import ForeignConfig, detect_tool
from packtool.translate.render import as_command, as_yaml, report
from tests.translate.test_tools import translated

pytestmark = pytest.mark.smoke

VALUES = {
    "model_name_or_path": "my model",
    "stage": "sft",
    "dataset": "a,b",
    "cutoff_len": 1024,
    "template": "qwen",
    "lr_scheduler_kwargs": {"min_lr": 1e-6},
    "tf32": True,
}


def test_yaml_has_foreign_names_and_omissions() -> None:
    text = as_yaml(translated("LLaMA-Factory", VALUES), "train")
    assert 'model: "my model"  # model_name_or_path\n' in text
    assert "weight_decay: 0  # default of LLaMA-Factory: transformers' TrainingArguments\n" in text
    assert "\n#   template: packtool uses the model's own chat template" in text
    assert text.startswith("# LLaMA-Factory to packtool; run: packtool train --config FILE\n")
    values = parse_yaml(text)
    assert values["training"] == {"tf32": True}
    assert values["lr_scheduler_kwargs"] == {"min_lr": 1e-6}


def test_command_has_the_same_options() -> None:
    translation = translated("LLaMA-Factory", VALUES)
    command, *comments = as_command(translation, "train").replace(" \\\n", " ").splitlines()
    words = shlex.split(command)
    assert words[:2] == ["packtool", "train"]
    assert words[words.index("--max-length") + 1] == "1024"
    assert "--set training.tf32=true" in command
    assert words[words.index("--model") + 1] == "my model"
    assert json.loads(words[words.index("--lr-scheduler-kwargs") + 1]) == {"min_lr": 1e-6}
    assert all(line.startswith("# ") for line in comments)


def test_report_names_everything() -> None:
    text = report(translated("LLaMA-Factory", VALUES))
    assert "cutoff_len → --max-length 1024" in text
    assert "defaults of LLaMA-Factory: " in text
    assert "--learning-rate 5e-05 (transformers' TrainingArguments)" in text
    assert "without effect: stage (rows with only text" in text


TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f\x85"), min_size=1)
FILES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "LLaMA-Factory": st.fixed_dictionaries(
        {"model_name_or_path": TEXTS, "stage": st.sampled_from(["sft", "pt"]), "dataset": st.just("a")},
        optional={
            "cutoff_len": st.integers(2, 10**6),
            "lora_rank": st.integers(1, 64),
            "learning_rate": st.floats(1e-9, 1.0),
            "max_samples": st.integers(1, 10**6),
            "default_system": TEXTS,
            "disable_shuffling": st.booleans(),
            "run_name": TEXTS,
        },
    ),
    "axolotl": st.fixed_dictionaries(
        {"base_model": TEXTS, "datasets": st.just([{"path": "a.jsonl", "type": "chat_template"}])},
        optional={
            "sequence_len": st.integers(2, 10**6),
            "sample_packing": st.booleans(),
            "evals_per_epoch": st.integers(0, 9),
            "val_set_size": st.floats(0, 0.9),
            "adapter": st.sampled_from(["lora", "qlora", None]),
            "saves_per_epoch": st.integers(0, 9),
        },
    ),
    "TRL": st.fixed_dictionaries(
        {"model_name_or_path": TEXTS, "dataset_name": st.just("u/a"), "use_peft": st.booleans()},
        optional={"assistant_only_loss": st.booleans(), "run_name": TEXTS, "warmup_steps": st.floats(0, 0.9)},
    ),
    "ms-swift": st.fixed_dictionaries(
        {"model": TEXTS, "dataset": st.lists(TEXTS, min_size=1), "load_from_cache_file": st.booleans()},
        optional={"system": TEXTS, "packing": st.booleans(), "tuner_type": st.sampled_from(["lora", "full"])},
    ),
}


EXAMPLES: dict[str, dict[str, Any]] = {
    "LLaMA-Factory": VALUES,
    "ms-swift": {"model": "m", "dataset": "a", "model_name": 1},
    "axolotl": {"base_model": "m", "datasets": [{"path": "a.jsonl"}], "evals_per_epoch": 4, "val_set_size": 0.1},
    "TRL": {"model_name_or_path": "m", "dataset_name": "u/a", "use_peft": True, "tf32": True},
}


@pytest.mark.parametrize("tool", FILES)
def test_translating_twice_changes_nothing(tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @given(FILES[tool])
    def check(values: dict[str, Any]) -> None:
        assert detect_tool(values, "a.yaml") == tool
        translation = translated(tool, values)
        text = as_yaml(translation, "train")
        again = parse_yaml(text)
        assert again == json.loads(json.dumps(translation.values))
        assert detect_tool(again, "b.yaml") is None  # packtool's own

    check()
    once, twice = tmp_path / "once.yaml", tmp_path / "twice.yaml"
    once.write_text(json.dumps(EXAMPLES[tool]))
    assert run(["translate", str(once)]) == EXIT_OK
    output = capsys.readouterr().out
    twice.write_text(output)
    assert run(["translate", str(twice)]) == EXIT_OK
    assert capsys.readouterr().out == output


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "NPROC_PER_NODE=2",
        "swift",
        "sft",
        "--model",
        "m",
        "--dataset",
        "a.jsonl",
        "--packing",
        "true",
        "--model_author",
        "x",
    ]
    assert run(["translate", "--as", "command", "--", *words]) == EXIT_OK
    output = capsys.readouterr().out
    assert output.startswith("NPROC_PER_NODE=2 packtool train \\\n")
    assert "--packing true" in output
    assert run(["translate", "--json", "--", *words]) == EXIT_OK
    figures = json.loads(capsys.readouterr().out)
    assert (figures["tool"], figures["environment"]) == ("ms-swift", {"NPROC_PER_NODE": "2"})
    assert run(["translate", "--", "swift", "sft", "--task_type", "seq_cls", "--loss_type", "x"]) == EXIT_USAGE
    stderr = capsys.readouterr().err
    assert "seq_cls" in stderr
    assert "loss_type" in stderr


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("", [], "the file is empty"),
        ("stage: sft\nmodel_name_or_path: m\ncutoff_len: x\n", [], "'x' is not a number"),
        ("stage: sft\nbase_model: m\n", [], "mixes keys of several tools"),
        ("a: 1\n", ["--from", "unsloth"], "known are ms-swift"),
        ("stage: sft\nfinetuning_type: freeze\ndataset: a\n", [], "its layers are unknown: give full"),
        ("stage: sft\nshift_attn: true\nlearning_rate: high\n", [], "'high' is not a number"),
    ],
)
@pytest.mark.parametrize("command", ["translate", "train --config"])
def test_bad_input_is_one_error(
    command: str, text: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    if not text and command != "translate":
        words = ["--from", "trl"]
    assert run([*command.split(), str(file), *words]) == EXIT_USAGE
    stderr = capsys.readouterr().err
    assert message in stderr
    assert stderr.count("error:") == 1


def test_missing_packages_are_in_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("packtool.config.packages._is_installed", lambda _: False)
    file = tmp_path / "a.yaml"
    file.write_text("model_name_or_path: m\nstage: sft\ndataset: a\nenable_liger_kernel: true\nshift_attn: true\n")
    assert run(["train", "--config", str(file)]) == EXIT_USAGE
    stderr = capsys.readouterr().err
    assert "pip install liger-kernel" in stderr
    assert "shift_attn" in stderr
    assert run(["translate", str(file)]) == EXIT_USAGE
    assert "pip install" not in capsys.readouterr().err


def test_from_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--from", "trl", "--model", "m"]) == EXIT_USAGE
    assert "give it with --config" in capsys.readouterr().err
    assert ForeignConfig("TRL", {}).is_record is False
