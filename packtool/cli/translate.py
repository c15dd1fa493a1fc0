"""``packtool translate``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from packtool.cli.options import Invocation
from packtool.config.commands import TranslateConfig
from packtool.config.settings import resolve
from packtool.errors import ConfigError
from packtool.translate.names import Translation
from packtool.translate.read import SETTINGS, ForeignConfig, read_command, read_file
from packtool.translate.render import as_command, as_yaml
from packtool.translate.tools import translate


def run_translate(config: TranslateConfig, invocation: Invocation) -> None:
    """Print the equivalent of another tool's file or command line; packtool's own YAML is printed unchanged."""
    source = _read_source(config)
    command = source.command  # the command of packtool that does the same
    settings_class = SETTINGS[command]
    is_own_yaml = not source.tool
    if is_own_yaml:
        translation = Translation(source, values=dict(source.values), origins=dict.fromkeys(source.values, ""))
    else:
        option_names = [field.name for field in dataclasses.fields(settings_class)]
        translation = translate(source, option_names, command, os.environ)
    _check(settings_class, translation)

    if config.form == "command":
        text = as_command(translation, command)
    elif is_own_yaml:
        text = Path(config.file).read_text(encoding="utf-8").rstrip("\n")
    else:
        text = as_yaml(translation, command)
    json_output = {
        "tool": source.tool or "packtool",
        "command": command,
        "options": translation.values,
        "environment": translation.environ,
        "omitted": dict(translation.omitted),
    }
    invocation.show(json_output, [text])


def _read_source(config: TranslateConfig) -> ForeignConfig:
    """Read the file or the command line; its tool is "" for packtool's own YAML."""
    if bool(config.file) == bool(config.command_line):
        raise ConfigError("give a file, or -- and a command line, as in: packtool translate -- swift sft --model DIR")
    if config.command_line:
        return read_command(config.command_line)
    source = read_file(config.file, config.tool, label=config.file)
    if not source.values and not source.tool:
        raise ConfigError(f"{config.file}: the file is empty")
    return source


def _check(cls: type[Any], translation: Translation) -> None:
    """Check the options as the command will, except for packages, which only the machine that trains needs."""
    checked: type[Any] = type(cls.__name__, (cls,), {"missing_packages": lambda self: []})
    required = {"output_dir": "cache"} if "output_dir" not in translation.values else {}
    resolve(checked, {}, file={**required, **translation.values}, source_problems=translation.problems)
