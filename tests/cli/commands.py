"""Lines for a shell, run in this process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from packtool.cli.main import run
from tests.forked import run_ranks
from tests.waiting import PATIENCE_S


def run_here(script: str) -> None:
    """Run each line as a shell would read it: settings, which may stand alone, ``packtool``, its words.

    A process for each would import for longer than it works. Where a line starts several, they are forks of this one.
    """
    with pytest.MonkeyPatch.context() as outer_patch:
        outer_patch.setattr(os, "execvpe", _run_as_ranks)
        for line in script.replace("\\\n", " ").strip().splitlines():
            words = [os.path.expandvars(word) for word in shlex.split(line)]
            with pytest.MonkeyPatch.context() as patch:
                is_single_process = not words or words[0] == "export" or all("=" in word for word in words)
                for name, value in _settings(words):
                    (outer_patch if is_single_process else patch).setenv(name, value)
                if not is_single_process:
                    assert words.pop(0) in ("packtool", "swift")
                    assert run(words) == 0, line


def _settings(words: list[str]) -> Any:
    """Take settings from the front."""
    while words and (words[0] == "export" or "=" in words[0]):
        name, _, value = words.pop(0).partition("=")
        if name != "export":
            yield name, value


def _run_as_ranks(program: str, arguments: list[str], environ: dict[str, str]) -> NoReturn:
    """What torchrun would do, which a command has just decided to become."""
    assert "packtool.launch.torchrun" in arguments
    words = arguments[arguments.index("--module") + 2 :]
    with tempfile.TemporaryDirectory() as scratch:
        run_ranks(int(environ["NPROC_PER_NODE"]), _run_rank, words, scratch=Path(scratch))
    raise SystemExit(0)


def _run_rank(words: list[str]) -> None:
    assert run(words) == 0


def run_in_shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lines by bash, with the installed command first in PATH."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
