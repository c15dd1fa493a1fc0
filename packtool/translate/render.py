"""Output of a translation: the report at startup, packtool's YAML, and a command line."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

from packtool.config.settings import flag
from packtool.translate.names import Translation, as_text

# Characters that YAML allows only as escapes.
_NOT_IN_YAML = re.compile(r"[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def report(translation: Translation) -> str:
    """Return the block that a run prints at startup."""
    translated: dict[str, list[str]] = {}  # options with their values, by foreign name
    defaults = []
    for option, origin in translation.origins.items():
        assignment = f"{flag(option)} {_word(translation.values[option])}"
        if option in translation.defaults:
            defaults.append(f"{assignment} ({origin})")
        else:
            translated.setdefault(origin, []).append(assignment)
    tool = translation.source.tool
    texts = {
        "translated": ", ".join(f"{name} → {' '.join(options)}" for name, options in translated.items()),
        f"defaults of {tool}": ", ".join(defaults),
        "without effect": "; ".join(f"{name} ({reason})" for name, reason in translation.omitted),
    }
    lines = [f"  {title}: {text}" for title, text in texts.items() if text]
    return "\n".join([f"{translation.source.label}: a configuration of {tool}", *lines])


def _word(value: Any) -> str:
    """Return a value as one or several words of a shell."""
    if isinstance(value, dict):
        return shlex.quote(json.dumps(value))
    if isinstance(value, (list, tuple)):
        return " ".join(shlex.quote(as_text(item)) for item in value)
    return shlex.quote(as_text(value))


def as_yaml(translation: Translation, command: str) -> str:
    """Return packtool's YAML with the foreign name behind each line, and the keys without effect at the end."""
    start = shlex.join(["packtool", command, "--config", "FILE"])
    lines = [f"# {translation.source.tool} to packtool; run: {_variables(translation)}{start}"]
    for option, value in translation.values.items():
        kind = f"default of {translation.source.tool}: " if option in translation.defaults else ""
        lines.append(f"{option}: {_scalar(value)}  # {kind}{_one_line(translation.origins[option])}")
    if translation.omitted:
        lines.append("# Without effect:")
        lines += [f"#   {_one_line(name)}: {_one_line(reason)}" for name, reason in translation.omitted]
    return "\n".join(lines)


def as_command(translation: Translation, command: str) -> str:
    """Return a command line for a shell, and the keys without effect as comments."""
    words = [f"{_variables(translation)}packtool {command}"]
    for option, value in translation.values.items():
        if option == "training":
            words += [f"--set {shlex.quote(f'training.{name}={as_text(item)}')}" for name, item in value.items()]
        elif value not in ([], ()):
            words.append(f"{flag(option)} {_word(value)}")
    omitted = [f"# {_one_line(name)}: {_one_line(reason)}" for name, reason in translation.omitted]
    return "\n".join([" \\\n    ".join(words), *omitted])


def _variables(translation: Translation) -> str:
    return "".join(f"{name}={shlex.quote(value)} " for name, value in translation.environ.items())


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _scalar(value: Any) -> str:
    """Return a value as YAML on one line; JSON is YAML, and quotes texts that YAML would read as something else."""
    text = json.dumps(value, ensure_ascii=False)
    return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
