"""Reading configuration files and command lines of other tools, and detecting the tool."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any

from packtool.config.compat_names import TRANSFORMERS, compat_entries
from packtool.config.data import ExportConfig
from packtool.config.settings import parse_yaml
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError

TOOLS = {"ms-swift": "ms-swift", "llama-factory": "LLaMA-Factory", "axolotl": "axolotl", "trl": "TRL"}
"""Names of the tools by value of ``--from``."""
MAX_NODES = 100_000
SETTINGS = {"export": ExportConfig, "train": TrainConfig}
FIELDS = {each.name: (each, cls) for cls in SETTINGS.values() for each in dataclasses.fields(cls)}
OPTIONS = {
    name.replace("-", "_"): each.name for each, _ in FIELDS.values() for name in (each.name, *each.metadata["aliases"])
}
"""Fields of the settings by the names of their options, with underscores."""
_PROCESS_OPTIONS = ("num_processes", "nproc_per_node", "num_gpus")
_MODEL_KEYS = ("model", "model_name_or_path", "base_model")
_RECORD_KEYS = {"global_world_size", "model_suffix", "model_info", "model_meta"}


@dataclass
class ForeignConfig:
    """Configuration of another tool.

    Args:
        tool: a value of ``TOOLS``.
        values: by name, with underscores; those of YAML, or texts and lists of texts of a command line.
        command: ``train`` or ``export``.
        environ: variables set in front of the command, with the launcher's number of processes.
        label: file or command for messages.
    """

    tool: str
    values: dict[str, Any]
    command: str = "train"
    environ: dict[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def is_record(self) -> bool:
        """True for the args.json of ms-swift's checkpoints, which has all arguments: given, default and computed."""
        return bool(_RECORD_KEYS & set(self.values))

    @property
    def model_directory(self) -> Path:
        """Directory of the model, or its id on a hub."""
        return Path(str(next((self.values[key] for key in _MODEL_KEYS if self.values.get(key)), None)))

    @functools.cached_property
    def model_config(self) -> dict[str, Any]:
        """The config.json of the model; {} if the model is not local."""
        path = self.model_directory / "config.json"
        return load_config_file(str(path)) if path.exists() else {}


def load_config_file(path: str) -> dict[str, Any]:
    """Read a YAML or JSON file of names and values."""
    import yaml  # here, because most runs need none of it

    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _count_checked(root, {})  # raises for duplicate keys and YAML bombs, which parse_yaml would read
        value = parse_yaml(text)
    except RecursionError as error:
        raise ConfigError(f"--config {path}: lists and objects nest too deeply") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", "Give the path of a YAML or JSON file.") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"--config {path}: expected names and values, found a {type(value).__name__}")
    return {str(key): item for key, item in (value or {}).items()}


def _count_checked(node: Any, counts: dict[int, int]) -> int:
    """Return the number of nodes in a YAML tree with aliases expanded; ``counts`` has results by ``id`` of the node."""
    if counts.get(id(node)) == 0:  # not finished
        raise ValueError(f"line {node.start_mark.line + 1}: a value contains itself")
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = 0
    total = 1
    for child in _children(node):
        total += _count_checked(child, counts)
    if total > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES:,} values after expanding YAML's aliases")
    counts[id(node)] = total
    return total


def _children(node: Any) -> list[Any]:
    """Return the items of a YAML list, or the keys and values of an object; ValueError for duplicate keys."""
    if node.id != "mapping":
        return node.value if node.id == "sequence" else []
    children = []
    keys: set[str] = set()
    for key, value in node.value:
        if isinstance(key.value, str) and key.value in keys:
            raise ValueError(f"line {key.start_mark.line + 1}: the key {key.value!r} is there twice; remove one")
        keys.add(str(key.value))
        children += [key, value]
    return children


def detect_tool(values: Mapping[str, Any], label: str, from_option: str | None = None) -> str | None:
    """Return the tool whose configuration has these keys; None for packtool's own; ConfigError if it is not clear."""
    if from_option is not None:
        if from_option.lower() not in TOOLS:
            raise ConfigError(f"--from {from_option}: known are {', '.join(TOOLS)}")
        if not values:
            raise ConfigError(f"{label}: the file is empty")
        return TOOLS[from_option.lower()]
    tools_by_key = {key: {entry.tool for entry in compat_entries(key) if not entry.is_variable} for key in values}
    keys_by_tool = _unique_keys(tools_by_key)  # keys that only one tool has
    if len(keys_by_tool) > 1:
        keys = "; ".join(f"{tool}: {', '.join(names)}" for tool, names in sorted(keys_by_tool.items()))
        raise ConfigError(f"{label} mixes keys of several tools: {keys}", "Remove those of all tools but one.")
    if keys_by_tool:
        (tool,) = keys_by_tool
        return None if _has_packtool_keys(tool, tools_by_key) else tool
    if "model_name_or_path" in values:
        raise ConfigError(
            f"{label}: model_name_or_path is a key of LLaMA-Factory and TRL, and no other key decides which",
            "Add --from llama-factory or --from trl.",
        )
    return None


def _has_packtool_keys(tool: str, tools_by_key: Mapping[str, set[str]]) -> bool:
    """Return whether a key is an option of packtool that ``tool`` does not have."""
    keys_of_tool = {key for key, tools in tools_by_key.items() if tools & {tool, TRANSFORMERS}}
    if tool == "axolotl":
        keys_of_tool.add("strict")  # with another meaning
    return any(key in OPTIONS and key not in keys_of_tool for key in tools_by_key)


def read_file(path: str, from_option: str | None, label: str) -> ForeignConfig:
    """Read a configuration file; its tool is "" for packtool's own YAML."""
    values = load_config_file(path)
    tool = detect_tool(values, label, from_option)
    command = "export" if values.get("to_cached_dataset") else "train"
    return ForeignConfig(tool or "", values, command, label=label)


def _unique_keys(tools_by_key: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return, by tool, the keys that only this tool has: neither another one, nor transformers, nor packtool."""
    keys_by_tool: dict[str, list[str]] = {}
    for key, tools in tools_by_key.items():
        known_tools = tools & set(TOOLS.values())
        if len(known_tools) == 1 and TRANSFORMERS not in tools and key not in OPTIONS:
            keys_by_tool.setdefault(known_tools.pop(), []).append(key)
    return keys_by_tool


def read_command(words: Sequence[str]) -> ForeignConfig:
    """Read a command line of another tool, with variables and a launcher in front of it."""
    variables = list(itertools.takewhile(re.compile(r"[A-Za-z_]\w*=").match, words))
    environ = dict(variable.split("=", 1) for variable in variables)
    words = words[len(variables) :]
    label = shlex.join(words)
    launcher, tool, command, rest = _split_command(words)
    values = _read_options(rest, tool)
    if launcher[-1] == "pt":  # as in ms-swift, these are the defaults of swift pt
        values = {"loss_scale": "all", "use_chat_template": False, **values}
    for name, value in _num_processes(launcher).items():
        environ.setdefault(name, value)
    return ForeignConfig(tool, values, command, environ, label)


def _split_command(words: Sequence[str]) -> tuple[Sequence[str], str, str, Sequence[str]]:
    """Return the words up to a command of ``commands.tsv``, its tool, packtool's command, and the words after it."""
    for position in range(len(words)):
        for patterns, tool, command in read_table("commands.tsv"):
            end = position + len(patterns.split())
            if fnmatchcase(" ".join(words[position:end]), patterns):
                return words[:end], tool, command, words[end:]
    known = ", ".join(patterns.strip("*") for patterns, _, _ in read_table("commands.tsv") if " " in patterns)
    raise ConfigError(
        f"{shlex.join(words[:2]) or 'the command line'}: not one of the commands that can be translated: {known}",
        "Give it as in: packtool translate -- swift sft --model DIR --dataset rows.jsonl",
    )


def _num_processes(launcher: Sequence[str]) -> dict[str, str]:
    """Return NPROC_PER_NODE as in the options of a launcher, or in accelerate's file; {} for a single process."""
    _, options = _split_options(launcher)
    paths = [path for path in options.get("config_file", [])[:1] if os.path.exists(path)]
    in_files = [load_config_file(path).get("num_processes") for path in paths]
    in_options = [option[0] for name, option in options.items() if name in _PROCESS_OPTIONS and option]
    numbers = [str(number) for number in [*in_options, *in_files] if str(number).isdigit()]
    return {"NPROC_PER_NODE": numbers[0]} if numbers and int(numbers[0]) > 1 else {}


def _split_options(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the words before the first option, and the words behind each option by its name with underscores."""
    first_words: list[str] = []
    words_by_option: dict[str, list[str]] = {}
    current = first_words
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            current = words_by_option[name.replace("-", "_")] = [value] if equals else []
        else:
            current.append(word)
    return first_words, words_by_option


def _read_options(words: Sequence[str], tool: str) -> dict[str, Any]:
    """Return the values of files, and of ``NAME=VALUE`` words and options, which take precedence over files."""
    first_words, words_by_option = _split_options(words)
    paths: list[str] = []
    values: dict[str, Any] = {}
    for word in first_words:
        name, equals, text = word.partition("=")
        if word.endswith((".yaml", ".yml", ".json")):
            paths.append(word)
        elif equals:
            values[name.lstrip("+")] = parse_yaml(text)  # +NAME=VALUE means the same
        else:
            raise ConfigError(f"unexpected word {word!r} in the command line of {tool}")
    paths += words_by_option.pop("config", [])
    for option, items in words_by_option.items():
        single_value = items[0] if items else True
        values[option] = items if len(items) > 1 else single_value
    in_files: dict[str, Any] = {}
    for path in paths:
        in_files |= load_config_file(path)
    return {**in_files, **values}


@functools.cache
def read_table(name: str) -> tuple[tuple[str, ...], ...]:
    """Return the lines of a table of this package, without comments."""
    text = resources.files("packtool.translate").joinpath(name).read_text(encoding="utf-8")
    return tuple(tuple(line.split("\t")) for line in text.splitlines() if line and not line.startswith("#"))
