"""Lines for a shell, run in this process."""

from __future__ import annotations

import os
import shlex

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
