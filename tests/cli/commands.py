"""Lines for a shell, run in this process."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from packtool.cli.main import run


def run_here(script: str) -> None:
    """Run each line as a shell would read it: settings in front, ``packtool``, its words.

    A process for each would import for longer than it works.
    """
    for line in script.replace("\\\n", " ").strip().splitlines():
        words = [os.path.expandvars(word) for word in shlex.split(line)]
        with pytest.MonkeyPatch.context() as patch:
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                patch.setenv(name, value)
            assert words.pop(0) == "packtool"
            assert run(words) == 0, line


def run_in_shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run lines by bash, with the installed command first in PATH."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
