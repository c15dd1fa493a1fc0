"""README's commands are run, and what it says of the command line is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packtool.demo.dataset import make_rows
from tests.cli.commands import run_here, run_in_shell
from tests.cli.narrow_model import make_narrow_model


def blocks(repository: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)


def test_the_two_commands(repository: Path, tmp_path: Path) -> None:
    """The whole demo, as a newcomer starts it: the model has to learn to see."""
    quickstart, test = (line.partition("#")[0].strip() for line in blocks(repository)[0].strip().splitlines())
    if not (repository / ".venv").exists():
        pytest.skip("the scripts would install an environment of their own")
    output = run_in_shell(f"{quickstart} --output-dir {tmp_path / 'demo'}", repository).stdout
    page = (repository / "docs" / "getting-started.md").read_text()
    shown_output = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown_output
    for line in output[output.index("rows ") :].strip().splitlines():
        name = re.split(r"\s{2,}", line.strip())[0]
        assert name in shown_output.group(1), f"docs/getting-started.md does not show {name!r}"
    figures = {
        label.strip(): float(share) for label, share in re.findall(r"^ *(.*?) {2,}([\d.]+)% *$", output, re.MULTILINE)
    }
    (accuracy,) = (share for label, share in figures.items() if label.startswith("accuracy on"))
    assert accuracy >= 90
    assert abs(figures["with the pictures swapped"] - figures["chance"]) < 8
    assert "test_readme" in run_in_shell(f"{test} --collect-only -n 0 -q tests/test_readme.py", repository).stdout


def test_the_two_stages(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line; the one that starts several processes by way of bash and the installed command."""
    make_narrow_model(tmp_path / "model")
    make_rows(str(tmp_path), 40, 0)
    (tmp_path / "train.json").rename(tmp_path / "rows.json")
    monkeypatch.chdir(tmp_path)
    lines = re.findall(r"(?:.*\\\n)*.+", blocks(repository)[1])
    assert [line.startswith("NPROC_PER_NODE=2 packtool train") for line in lines].count(True) == 1
    for line in lines:
        if line.startswith("NPROC_PER_NODE"):
            run_in_shell(line, tmp_path)
        else:
            run_here(line)
    assert list((tmp_path / "output").glob("checkpoint-*/adapter_model.safetensors"))


def test_every_named_option_exists(repository: Path) -> None:
    from packtool.cli.main import _SETTINGS
    from packtool.cli.options import option_kinds

    known = {name for settings in _SETTINGS.values() for name in option_kinds(settings)} | {
        "--help",
        "--set",
        "--no-deps",
    }
    for name in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (repository / "README.md").read_text())):
        assert name in known, name


def test_every_command_is_named(repository: Path) -> None:
    from packtool.cli.main import _SETTINGS

    text = (repository / "README.md").read_text()
    assert all(f"packtool {command}" in text or command == "demo" for command in _SETTINGS)
