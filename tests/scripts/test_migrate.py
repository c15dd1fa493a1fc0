"""Examples of other tools get local models and rows, run as dry runs, and become lines of a table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts._migrate import NotTrainedError, Result, World, markdown, replaced, try_example
from scripts._migration_examples import Example


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("migrate"))


def test_only_models_and_data_are_replaced(world: World) -> None:
    command = "swift sft --model Qwen/Qwen2.5-7B --dataset a/b:c#10 d --lora_rank 8 --system hello"
    words, settings = replaced(Example("ms-swift", "a.sh", tuple(command.split(" "))), world)
    rows = str(world.rows("messages"))
    local = ["--model", str(world.root / "qwen2"), "--dataset", f"{rows}#10", rows]
    assert (words, settings) == (("swift", "sft", *local, "--lora_rank", "8", "--system", "hello"), None)


def test_names_of_modules_are_those_of_the_replacement(world: World) -> None:
    values = {"base_model": "HuggingFaceTB/SmolVLM2-2.2B-Instruct"}
    for targets, expected in [("model.text_model.a", "model.language_model.a"), (["q_proj"], ["q_proj"])]:
        _, settings = replaced(Example("axolotl", "a.yml", settings={**values, "lora_target_modules": targets}), world)
        assert settings is not None
        assert settings["lora_target_modules"] == expected


def test_rows_have_the_format_that_the_example_names(world: World) -> None:
    mapping = {"role": "from", "content": "value"}
    entries = [
        {"path": "a/b", "type": "alpaca", "split": "train"},
        {"path": "c", "type": "chat_template", "field_messages": "turns", "message_property_mappings": mapping},
        {"path": "d", "type": "completion", "field": "chapter", "name": "en"},
    ]
    values = {"base_model": "NousResearch/Llama-3.2-1B", "datasets": entries, "adapter": "lora"}
    _, settings = replaced(Example("axolotl", "a.yml", settings=values), world)
    assert settings is not None
    first_rows = [json.loads(Path(entry["path"]).read_text().splitlines()[0]) for entry in settings["datasets"]]
    assert list(first_rows[0]) == ["instruction", "input", "output"]
    assert [(turn["from"], "value" in turn) for turn in first_rows[1]["turns"]] == [("human", True), ("gpt", True)]
    assert list(first_rows[2]) == ["chapter"]
    assert [set(entry) - {"path"} for entry in settings["datasets"]] == [
        {"type", "split"},
        {"type", "field_messages", "message_property_mappings"},
        {"type", "field"},
    ]
    assert (settings["base_model"], settings["adapter"]) == (str(world.root / "llama"), "lora")


def test_models_that_are_not_trained_are_named(world: World) -> None:
    for name, reason in (
        ("google/gemma-3n-E2B-it", "not been verified"),
        ("a/unknown", "no small model"),
        ("Qwen/Qwen-7B", "no class"),
    ):
        with pytest.raises(NotTrainedError, match=reason):
            world.model(name)


def test_examples_run_or_are_refused(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKTOOL_CACHE_DIR", str(tmp_path / "cache"))
    options = {"model": "Qwen/Qwen2.5-VL-7B-Instruct", "dataset": "a", "tuner_type": "lora", "max_length": "512"}
    command = ["swift", "sft", *(word for key, value in options.items() for word in (f"--{key}", value))]
    results = [
        try_example(Example("ms-swift", "a.sh", tuple(command)), world, {}),
        try_example(Example("ms-swift", "b.sh", (*command, "--quant_method", "hqq")), world, {}),
        try_example(Example("ms-swift", "c.sh", excluded="inference"), world, {}),
    ]
    assert [result.outcome for result in results] == ["runs", "refused", "not counted"], results
    assert "bitsandbytes" in results[1].reason


def test_table_counts_by_project() -> None:
    results = [Result(Example("TRL", "a.md"), "runs", ""), Result(Example("TRL", "b.md"), "refused", "a|b")]
    table = markdown([*results, Result(Example("TRL", "c.md"), "not counted", "x")], {"TRL": "0123456789abcdef"})
    assert "| TRL | 0123456789ab | 2 | 1 | 50% |" in table
    assert "| TRL | b.md | refused | a\\|b |" in table
