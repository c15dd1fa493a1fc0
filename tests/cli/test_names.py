"""What is said to people who give a name of another tool, of another command, or one with a slip."""

from __future__ import annotations

import ast
import logging
import re
import sys
import types
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import packtool
from packtool.cli.main import _SETTINGS, run
from packtool.cli.options import UnknownOptions
from packtool.config.conflicts import conflict_table
from packtool.config.data import ExportConfig
from packtool.config.settings import option_names
from packtool.config.train import TrainConfig
from packtool.errors import EXIT_MISMATCH, EXIT_OK, EXIT_USAGE

EXPORT = ["export", "--model", "m", "--output-dir", "o", "--max-length", "9", "--dataset", "a.jsonl"]


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("train --sequence_len 4096", "--sequence-len (axolotl) is --max-length here"),
        ("train --lr 1e-4", "--lr (Megatron) is --learning-rate here"),
        ("train --cutoff_len=2048", "--cutoff-len (LLaMA-Factory) is --max-length here"),
        ("train --use_dynamic_bsz true", "--dynamic-batch-tokens"),
        ("train --max_packing_token_size 8192", "--dynamic-batch-tokens"),
        ("train --tf32 true", "--set training.tf32=true"),
        ("train --torch_compile_mode default", "torch's default mode"),
        ("train --load_in_4bit true", "--load-in-4bit (axolotl, TRL) is --quant-bits 4 here"),
        ("train --rows-per-shard 9", "an option of packtool export"),
        ("train --packin_length 9", "No such option: --packin-length; did you mean --packing-length?"),
        ("train --packing_algorithm bestfit", "none of best_fit, binpacking, sequential; did you mean 'best_fit'?"),
        ("inspect --expand auto", "option of packtool export, import, check, train"),
        ("inspect --directry x", "did you mean --directory? ["),
        ("export --packing true", "remove the option: packtool train packs"),
        ("export --num_train_epochs 3", "an option of packtool train"),
        ("plan --set sequence_len=3", "'sequence_len' (axolotl) is --max-length here"),
        ("plan --set packin_length=3", "did you mean --packing-length?"),
    ],
)
def test_unknown_options_get_a_suggestion(words: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == EXIT_USAGE
    stderr = capsys.readouterr().err
    assert output in stderr
    assert "Traceback" not in stderr


def test_all_unknown_options_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "--lr", "1", "--cutoff_len", "2", "--packin_length", "3"]) == EXIT_USAGE
    assert "3 settings are wrong" in capsys.readouterr().err


def test_unknown_yaml_keys_get_a_suggestion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "model: m\nmodel_name_or_path: m\ncutoff_len: 4096\nstage: sft\nuse_unsloth: false\nflash_attn: fa2\n"
    )
    assert run(["train", "--config", str(file)]) == EXIT_USAGE
    stderr = capsys.readouterr().err
    for part in (
        "'model_name_or_path' (LLaMA-Factory, TRL) is --model here",
        "'flash_attn'",
        "'stage' (LLaMA-Factory) has no",
    ):
        assert part in stderr
    assert "use_unsloth" not in stderr


def test_names_without_effect_are_accepted_with_a_warning() -> None:
    output: list[str] = []
    unknown = UnknownOptions("train", {"train": TrainConfig, "export": ExportConfig}, output.append)
    option_names = ("model_type", "template", "lazy_tokenize", "per_device_eval_batch_size")
    for name in option_names:
        assert unknown.on_command_line("--" + name.replace("_", "-"), "x") is None
        assert unknown.in_settings(name, "x") is None
    assert len(output) == 2 * len(option_names)
    assert all("no effect here: " in line for line in output)


def test_disabling_an_unsupported_option_is_ignored() -> None:
    output: list[str] = []
    unknown = UnknownOptions("train", {"train": TrainConfig}, output.append)
    assert unknown.on_command_line("--use-galore", "false") is None
    assert "--optim galore_adamw" in (unknown.on_command_line("--use-galore", "true") or "")
    assert unknown.on_command_line("--quant-bits", None) is not None
    assert output == []


def test_unread_environment_variables_of_other_tools_are_warned_about() -> None:
    output: list[str] = []
    UnknownOptions("train", {"train": TrainConfig}, output.append).warn_of_variables(
        {"SWIFT_LOG_LEVEL": "DEBUG", "PACKING_CACHE": "c", "MODELSCOPE_CACHE": "x", "MAX_PIXELS": "9", "NFRAMES": ""}
    )
    assert output == ["environment variable PACKING_CACHE (ms-swift) is PACKTOOL_CACHE_DIR here"]


def test_ids_of_modelscope_need_its_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*EXPORT, "--use-hf", "false"]) == EXIT_USAGE
    assert "the package modelscope is not installed" in capsys.readouterr().err


def test_ids_of_modelscope_become_local_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packtool.rows.hubs import with_local_copies

    hub = types.ModuleType("modelscope.hub")
    downloads: list[tuple[str, object]] = []
    hub.snapshot_download = types.SimpleNamespace(  # type: ignore[attr-defined]
        snapshot_download=lambda name, **settings: downloads.append((name, settings)) or str(tmp_path / "model"),
        dataset_snapshot_download=lambda name: downloads.append((name, None)) or str(tmp_path / "rows"),
    )
    monkeypatch.setitem(sys.modules, "modelscope", types.ModuleType("modelscope"))
    monkeypatch.setitem(sys.modules, "modelscope.hub", hub)
    (tmp_path / "a.jsonl").write_text("")
    local = str(tmp_path / "a.jsonl")
    config = ExportConfig(
        model="Qwen/Qwen3-VL", dataset=("AI-ModelScope/alpaca#500", local), output_dir="o", max_length=9, use_hf=False
    )
    local_config = with_local_copies(config)
    assert (local_config.model, local_config.dataset) == (str(tmp_path / "model"), (f"{tmp_path}/rows#500", local))
    assert [name for name, _ in downloads] == ["Qwen/Qwen3-VL", "AI-ModelScope/alpaca"]


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("inspect", "Usage: packtool inspect [OPTIONS] CACHE"),
        ("plan", "[OPTIONS] [CACHE]..."),
        ("train", "train [OPTIONS]\n"),
    ],
)
def test_positional_values_are_in_the_usage_line(command: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == EXIT_OK
    assert usage in capsys.readouterr().out


def test_shell_completion_is_available(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["--help"]) == EXIT_OK
    assert "--install-completion" in capsys.readouterr().out


def test_an_unknown_log_level_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PACKTOOL_LOG_LEVEL", "LOUD")
    assert run(["plan", "x"]) == EXIT_USAGE
    assert "PACKTOOL_LOG_LEVEL=LOUD" in capsys.readouterr().err


def test_a_debugged_run_leaves_the_loggers_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    """``packtool`` can run several times in one process: handlers of the caller hear the run behind it again."""
    for words in (["--debug"], []):
        assert run(["plan", "no-such-cache", *words]) == EXIT_MISMATCH
    with caplog.at_level(logging.DEBUG, logger="packtool"):
        logging.getLogger("packtool.train.batches").debug("heard")
    assert caplog.messages == ["heard"]


PACKAGE = Path(packtool.__file__).parent
# The commands in which the errors of a module are raised; elsewhere none of a single command.
RAISED_IN = {
    **dict.fromkeys(("rows", "encode", "media"), ("export", "train")),
    **dict.fromkeys(("stream", "batch", "planning", "attention", "launch", "train/loop", "train/model"), ("train",)),
    **dict.fromkeys(("train/prepare", "cache/plan_file", "cache/local", "rows/read", "config/train"), ("train",)),
    **dict.fromkeys(("cache",), ("export",)),
    **dict.fromkeys(("packs",), ("pack",)),
    **dict.fromkeys(("simulate", "config/simulate"), ("simulate",)),
    **dict.fromkeys(("config/plan", "train/model/fit", "train/loop/media_times"), ("plan",)),
    **dict.fromkeys(("train/evaluate", "train/prepare/trained"), ("eval",)),
    "train/prepare/evaluation": (),  # of train and of eval, each in functions of its own
    **dict.fromkeys(("train/verify",), ("verify",)),
    "train/model/merge": ("merge",),
}
FOR_ALL = {"--config", "--set", "--json", "--debug", "--help"}


def test_errors_name_options_of_their_own_command() -> None:
    """Or say whose options they are: ``packtool export --max-length 8``, ``at export``."""
    options = {name: {word for f in fields(kind) for word in option_names(f)} for name, kind in _SETTINGS.items()}
    errors, num_checked = [], 0
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        place = max((place for place in RAISED_IN if module.startswith(place)), key=len, default="")
        messages = _messages(ast.parse(path.read_text()))
        for line, text in messages if module != "config/conflicts.py" else _rule_messages():
            named = [command for command in options if re.search(rf"\b{command}", text.lower())]
            for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w{-])", text):
                num_checked += 1
                commands = RAISED_IN.get(place, ()) if place else ()
                has_option = [option in options[command] for command in commands] or [
                    option in set().union(*options.values())
                ]
                if not (all(has_option) or option in FOR_ALL or any(option in options[command] for command in named)):
                    errors.append(f"{module}:{line}: {option} is no option of packtool {' and '.join(commands)}")
    assert num_checked > 200
    assert not errors


def _messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts of errors and of what functions named ``..._problems`` return, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0].endswith("Error"):
            yield node.lineno, " ".join(map(_literal, node.args))
        elif isinstance(node, ast.FunctionDef) and node.name.endswith("problems"):
            for part in ast.walk(node):
                if isinstance(part, ast.JoinedStr | ast.Constant) and part.lineno > (node.body[0].end_lineno or 0):
                    yield part.lineno, _literal(part)


def _rule_messages() -> Iterator[tuple[int, str]]:
    """Messages of the options that do not go together, with their numbers."""
    return enumerate(message for _, _, message in conflict_table())


def _literal(node: ast.AST) -> str:
    """The text of an expression, with braces for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_literal, node.values))
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + _literal(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"
