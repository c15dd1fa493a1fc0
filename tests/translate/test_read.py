"""Files and command lines of other tools: what is read, detected and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtool.errors import ConfigError
from packtool.translate.read import ForeignConfig, detect_tool, load_config_file, read_command

pytestmark = pytest.mark.smoke

LLAMA_FACTORY = {"model_name_or_path": "m", "stage": "sft", "cutoff_len": 2048, "dataset": "a,b", "bf16": True}
MS_SWIFT = {"model": "m", "dataset": ["a.jsonl"], "load_from_cache_file": True, "learning_rate": 1e-4}
AXOLOTL = {"base_model": "m", "datasets": [{"path": "a.jsonl"}], "sequence_len": 512}
TRL = {"model_name_or_path": "m", "dataset_name": "a", "assistant_only_loss": True}


@pytest.mark.parametrize(
    ("values", "tool"),
    [
        (LLAMA_FACTORY, "LLaMA-Factory"),
        (MS_SWIFT, "ms-swift"),
        (AXOLOTL, "axolotl"),
        (TRL, "TRL"),
        ({"model": "m", "dataset": ["a.jsonl"], "packing": True}, None),
        ({"model": "m", "look_ahead": 3, "cutoff_len": 2048}, None),
        ({}, None),
    ],
)
def test_tools_are_detected_by_keys_that_only_they_have(values: dict[str, object], tool: str | None) -> None:
    assert detect_tool(values, "a.yaml") == tool


def test_mixed_and_ambiguous_files_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"a.yaml mixes .*LLaMA-Factory: cutoff_len, stage|stage, cutoff_len"
    ) as error:
        detect_tool({**LLAMA_FACTORY, **AXOLOTL}, "a.yaml")
    assert "base_model" in str(error.value)
    with pytest.raises(ConfigError, match="--from llama-factory or --from trl"):
        detect_tool({"model_name_or_path": "m", "learning_rate": 1}, "a.yaml")
    with pytest.raises(ConfigError, match="known are ms-swift, llama-factory, axolotl, trl"):
        detect_tool(TRL, "a.yaml", "unsloth")
    with pytest.raises(ConfigError, match="empty"):
        detect_tool({}, "a.yaml", "trl")
    assert detect_tool({"model": "m"}, "a.yaml", "ms-swift") == "ms-swift"


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]" for before, name in zip("abcdef", "bcdefg", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is there twice"),
        ("a: {b: 1, b: 2}\n", "the key 'b' is there twice"),
        ('{"a": 1, "a": 2}', "the key 'a' is there twice"),
        (BOMB, "more than 100,000 values"),
        ("a: &a [*a]\n", "contains itself"),
        ("- a\n- b\n", "expected names and values, found a list"),
        ("a: [1\n", "line 2"),
    ],
)
def test_bad_files_are_one_error(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config_file(str(file))


def test_empty_file_has_no_values(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# nothing\n")
    assert load_config_file(str(file)) == {}


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as error:
            load_config_file(str(path))
        assert error.value.message == f"--config {path}: {reason}"
        assert error.value.remedy == "Give the path of a YAML or JSON file."


def test_command_lines(tmp_path: Path) -> None:
    source = read_command(["NPROC_PER_NODE=8", "swift", "sft", "--model", "m", "--dataset", "a", "b", "--packing=true"])
    assert source == ForeignConfig(
        "ms-swift",
        {"model": "m", "dataset": ["a", "b"], "packing": "true"},
        environ={"NPROC_PER_NODE": "8"},
        label="swift sft --model m --dataset a b --packing=true",
    )
    pretraining = {"loss_scale": "all", "use_chat_template": False}
    assert read_command(["swift", "pt", "--model", "m"]).values == {**pretraining, "model": "m"}
    assert read_command(["swift", "export", "--to_cached_dataset", "true"]).command == "export"
    file = tmp_path / "lf.yaml"
    file.write_text("model_name_or_path: m\nlearning_rate: 1\n")
    source = read_command(["llamafactory-cli", "train", str(file), "learning_rate=1e-5", "bf16=true"])
    assert source.values == {"model_name_or_path": "m", "learning_rate": 1e-5, "bf16": True}
    source = read_command(["axolotl", "train", str(file), "--micro-batch-size", "2"])
    assert (source.tool, source.values["micro_batch_size"]) == ("axolotl", "2")
    source = read_command(["trl", "sft", "--config", str(file), "--use_peft"])
    assert source.values == {"model_name_or_path": "m", "learning_rate": 1, "use_peft": True}


@pytest.mark.parametrize(
    ("launcher", "num_processes"),
    [
        ("python", None),
        ("accelerate launch", None),
        ("accelerate launch --num_processes 1", None),
        ("accelerate launch --num_processes 4 --mixed_precision bf16", "4"),
        ("torchrun --nproc_per_node=2", "2"),
        ("NPROC_PER_NODE=8 torchrun --nproc_per_node=2", "8"),
        ("python -m torch.distributed.run --nproc-per-node 2", "2"),
    ],
)
def test_launchers_give_the_number_of_processes(launcher: str, num_processes: str | None) -> None:
    source = read_command([*launcher.split(), "examples/scripts/sft.py", "--dataset_name", "a", "--use_peft"])
    assert (source.tool, source.environ.get("NPROC_PER_NODE")) == ("TRL", num_processes)
    assert source.values == {"dataset_name": "a", "use_peft": True}


def test_scripts_of_a_launcher_name_the_tool() -> None:
    for script, tool in (("swift/cli/sft.py", "ms-swift"), ("trl/scripts/sft.py", "TRL"), ("sft_vlm.py", "TRL")):
        assert read_command(["torchrun", "--nproc_per_node=2", script, "--dataset", "a"]).tool == tool


@pytest.mark.parametrize("words", [["swift", "rlhf"], ["ls", "-l"], [], ["axolotl", "train", "word"]])
def test_other_commands_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_command(words)
