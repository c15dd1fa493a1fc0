"""What a person gets from the command line: help, wrong options, missing files, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from packtool import __version__
from packtool.cli.main import _COMMANDS, run
from packtool.config.data import ExportConfig
from packtool.config.settings import option_names
from packtool.config.train import TrainConfig
from packtool.errors import EXIT_INTERRUPTED, EXIT_MISMATCH, EXIT_USAGE
from tests.forked import forked_process
from tests.waiting import PATIENCE_S, wait_for

EXPORT = ["export", "--model", "m", "--output-dir", "o", "--max-length", "9"]


def test_help_needs_neither_torch_nor_arrow() -> None:
    program = (
        "import sys; from packtool.cli.main import run; code = run(['--help']);"
        "heavy = {'torch', 'transformers', 'pyarrow', 'datasets', 'numpy', 'PIL', 'yaml', 'fsspec'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("export", "train", "sft", "demo"):
        assert command in done.stdout


@pytest.mark.smoke
@pytest.mark.parametrize(("command", "settings"), [("export", ExportConfig), ("train", TrainConfig)])
def test_help_names_every_option(command: str, settings: type, capsys: pytest.CaptureFixture[str]) -> None:
    import dataclasses

    assert run([command, "--help"]) == 0
    message = capsys.readouterr().out
    for field in dataclasses.fields(settings):
        for name in option_names(field) if field.metadata["panel"] else ():
            assert name in message


def test_help_names_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    page = capsys.readouterr().out.split("Documentation:")[1].strip()
    assert Path(page).read_text().startswith("# packtool")


def test_no_summary_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    width = max(map(len, _COMMANDS))
    for name, (_, _, summary) in _COMMANDS.items():
        assert [line for line in lines if line.split()[:1] == [name]] == [f"{name:<{width}}  {summary}"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exprot"], "No such command"),
        ([*EXPORT, "--dataset", "a", "--max_lenght", "3"], "No such option"),
        ([*EXPORT, "--dataset"], "requires an argument"),
        (EXPORT, "--dataset is missing"),
        ([*EXPORT, "--dataset", "a", "--split-dataset-ratio", "2"], "above the maximum of 0.999"),
        ([*EXPORT, "--dataset", "a", "--config", "gone.yaml"], "gone.yaml"),
        ([*EXPORT, "--dataset", "a"], "there is no such directory"),
        (["export", "--model", "./m", "--output-dir", "o", "--max-length", "9", "--dataset", "a"], "no such directory"),
    ],
)
def test_wrong_usage_is_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == EXIT_USAGE
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from packtool.demo.model import make_model

    directory = str(tmp_path_factory.mktemp("demo") / "model")
    make_model(directory, 0)
    return directory


@pytest.mark.smoke
def test_a_missing_cache_is_exit_4(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--model", model, "--cached-dataset", str(tmp_path / "gone")]
    assert run([*arguments, "--output-dir", str(tmp_path / "out")]) == EXIT_MISMATCH
    assert "no finished cache" in capsys.readouterr().err


def test_settings_from_a_file_and_one_json_document(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from packtool.demo.dataset import make_rows

    make_rows(str(tmp_path / "data"), 40, 0)
    (tmp_path / "export.yaml").write_text(
        f"model: {model}\ndataset: [{tmp_path}/data/train.json]\nmax-length: 40\ntruncation_strategy: left\n"
    )
    arguments = ["export", "--config", str(tmp_path / "export.yaml"), "--output_dir", str(tmp_path / "cache"), "--json"]
    capsys.readouterr()
    assert run(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_rows"] == document["num_samples"] + sum(document["dropped"].values()) == 40
    assert document["truncated"] > 0
    assert document["length"]["max"] == 40
    assert set(document) >= {
        *("num_rows", "num_samples", "truncated", "dropped", "tokens", "target_tokens", "media_tokens"),
        *("length", "seconds", "output_dir"),
    }


def test_ctrl_c_while_training_says_how_to_resume(model: str, tmp_path: Path) -> None:
    from packtool.demo.dataset import make_rows

    make_rows(str(tmp_path / "data"), 40, 0)
    export = ["export", "--model", model, "--dataset", f"{tmp_path}/data/train.json"]
    assert run([*export, "--max-length", "256", "--output-dir", f"{tmp_path}/cache"]) == 0
    train = ["train", "--model", model, "--cached-dataset", f"{tmp_path}/cache", "--packing", "true"]
    train += ["--packing-length", "256", "--save-steps", "1", "--num-train-epochs", "500"]
    train += ["--output-dir", f"{tmp_path}/o"]
    state = tmp_path / "o" / "checkpoint-1" / "packtool_state.json"
    with forked_process(run, train, output_path=tmp_path / "output.txt") as process:
        wait_for(state.exists, lambda: not process.is_alive())
        os.killpg(process.pid or 0, signal.SIGINT)
        process.join(PATIENCE_S)
    message = (tmp_path / "output.txt").read_text()
    assert process.exitcode == EXIT_INTERRUPTED, message
    assert "--resume-from-checkpoint true" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("crashes", [False, True])
def test_an_interrupt_exits_with_130_despite_teardown_crashes(crashes: bool, tmp_path: Path) -> None:
    """An interrupt in code made from a text, and C++ objects that crash when Python is taken apart."""
    (tmp_path / "interrupted.py").write_text(
        "import atexit, ctypes, packtool.cli.main as main\n"
        "atexit.register(print, 'seen to')\n"
        + ("ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)\n" if crashes else "")
        + "def run(arguments):\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        return 130\n"
        "main.run = run\n"
        "main.main([])\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout.strip()) == (EXIT_INTERRUPTED, "seen to")
