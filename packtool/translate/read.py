"""Reading configuration files and command lines of other tools, and detecting the tool.

Files are YAML or JSON. A duplicate key, a YAML bomb, an empty file, or a file that mixes tools is a ``ConfigError``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packtool.config.compat_names import TRANSFORMERS, compat_entries
from packtool.config.data import ExportConfig
from packtool.config.settings import option_names, parse_yaml
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError

TOOLS = {"ms-swift": "ms-swift", "llama-factory": "LLaMA-Factory", "axolotl": "axolotl", "trl": "TRL"}
"""Names of the tools by value of ``--from``."""
MAX_NODES = 100_000
_OWN_KEYS = {
    name.removeprefix("--").replace("-", "_")
    for cls in (TrainConfig, ExportConfig)
    for each in dataclasses.fields(cls)
    for name in option_names(each)
}
# Options of packtool that a tool uses for something else.
_OTHER_MEANINGS = {("axolotl", "strict")}
_MODEL_KEYS = ("model", "model_name_or_path", "base_model")
# Keys that only the files have that ms-swift writes beside checkpoints (args.json).
_RECORD_KEYS = {"global_world_size", "model_suffix", "model_info", "model_meta"}


@dataclass
class ForeignConfig:
    """Configuration of another tool.

    Args:
        tool: a value of ``TOOLS``.
        values: by name, with underscores; those of YAML, or texts and lists of texts of a command line.
        command: ``train`` or ``export``.
        environ: variables set in front of the command.
        num_processes: of the launcher in front of the command.
        label: file or command for messages.
    """

    tool: str
    values: dict[str, Any]
    command: str = "train"
    environ: dict[str, str] = field(default_factory=dict)
    num_processes: int | None = None
    label: str = ""

    @property
    def is_record(self) -> bool:
        """True for ms-swift's args.json, which holds every argument, also those left at their defaults."""
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
    """Read a YAML or JSON file of names and values; a ConfigError for anything else, duplicate keys and YAML bombs."""
    import yaml  # here, because most runs need none of it

    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            _num_nodes(root, {}, frozenset())
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


def _num_nodes(node: Any, counts: dict[int, int], parents: frozenset[int]) -> int:
    """Return the number of nodes in a YAML tree with aliases expanded; ValueError for too many and duplicate keys.

    ``counts`` has the results by ``id`` of nodes (an alias is the same object each time), ``parents`` the ``id`` of all
    nodes above this one.
    """
    if id(node) in parents:
        raise ValueError(f"line {node.start_mark.line + 1}: a value contains itself")
    if id(node) in counts:
        return counts[id(node)]
    total = 1
    for child in _child_nodes(node):
        total += _num_nodes(child, counts, parents | {id(node)})
    if total > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES:,} values after expanding YAML's aliases")
    counts[id(node)] = total
    return total


def _child_nodes(node: Any) -> list[Any]:
    """Return the items of a YAML list, or the keys and values of an object; ValueError for a duplicate key."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    children: list[Any] = []
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
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
    keys_by_tool = _keys_of_single_tools(values)
    if len(keys_by_tool) > 1:
        keys = "; ".join(f"{tool}: {', '.join(names)}" for tool, names in sorted(keys_by_tool.items()))
        raise ConfigError(f"{label} mixes keys of several tools: {keys}", "Remove those of all tools but one.")
    if not keys_by_tool:
        if "model_name_or_path" in values:
            raise ConfigError(
                f"{label}: model_name_or_path is a key of LLaMA-Factory and TRL, and no other key decides which",
                "Add --from llama-factory or --from trl.",
            )
        return None
    (tool,) = keys_by_tool
    is_own_config = any(_is_own_key(key, tool) for key in values)
    return None if is_own_config else tool


def _tools_of_key(key: str) -> set[str]:
    """Return the tools that have a key, ``TRANSFORMERS`` among them."""
    return {entry.tool for entry in compat_entries(key) if not entry.is_variable}


def _keys_of_single_tools(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return, by tool, the keys that only this tool has: neither another one, nor transformers, nor packtool."""
    keys_by_tool: dict[str, list[str]] = {}
    for key in keys:
        tools = _tools_of_key(key)
        known_tools = tools & set(TOOLS.values())
        if len(known_tools) == 1 and TRANSFORMERS not in tools and key not in _OWN_KEYS:
            keys_by_tool.setdefault(known_tools.pop(), []).append(key)
    return keys_by_tool


def _is_own_key(key: str, tool: str) -> bool:
    """Return whether packtool has a key that the tool has not, which makes a configuration one of packtool."""
    if key not in _OWN_KEYS or (tool, key) in _OTHER_MEANINGS:
        return False
    return not _tools_of_key(key) & {tool, TRANSFORMERS}


_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PROCESS_OPTIONS = ("num_processes", "nproc_per_node", "nproc-per-node", "num_gpus")
_SCRIPTS = (  # of a Python file or module, and the tool
    (re.compile(r"(^|/)swift/cli/sft\.py$"), "ms-swift"),
    (re.compile(r"(^|/)sft\w*\.py$|^trl\.scripts\.sft$"), "TRL"),
    (re.compile(r"^axolotl\.cli\.(train|preprocess)$"), "axolotl"),
    (re.compile(r"(^|/)train\.py$|^llamafactory\.cli$"), "LLaMA-Factory"),
)
_COMMANDS = {
    "swift": ("ms-swift", {"sft": "train", "pt": "train", "export": "export"}),
    "llamafactory-cli": ("LLaMA-Factory", {"train": "train"}),
    "axolotl": ("axolotl", {"train": "train", "preprocess": "export"}),
    "trl": ("TRL", {"sft": "train"}),
}
_EXAMPLE = "Give it as in: packtool translate -- swift sft --model DIR --dataset rows.jsonl"


@dataclass
class _CommandStart:
    """The words of a command line in front of its options.

    Args:
        rest: the words that are not read yet.
        verb: such as ``sft`` in ``swift sft``; empty for a script.
    """

    rest: list[str]
    tool: str | None = None
    command: str = "train"
    verb: str = ""
    num_processes: int | None = None


def read_command(words: Sequence[str]) -> ForeignConfig:
    """Read a command line of another tool, with variables and a launcher in front of it."""
    rest = list(words)
    environ: dict[str, str] = {}
    while rest and _ASSIGNMENT.match(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        environ[name] = value
    label = shlex.join(rest)
    start = _CommandStart(rest)
    while start.rest and start.tool is None:
        _read_word(start)  # removes the words that it reads from ``start.rest``
    if start.tool is None:
        raise ConfigError(f"{label or 'the command line'}: no command of {', '.join(TOOLS.values())}", _EXAMPLE)
    values = _read_options(start.rest, start.tool)
    if start.verb == "pt":  # as in ms-swift, these are the defaults of swift pt
        values = {"loss_scale": "all", "use_chat_template": False, **values}
    return ForeignConfig(
        start.tool,
        values,
        start.command,
        environ=environ,
        num_processes=start.num_processes,
        label=label,
    )


def _read_word(start: _CommandStart) -> None:
    """Read the next word of a command line, and the words that belong to it, up to the name of a tool's command."""
    word = start.rest.pop(0)
    program = os.path.basename(word)
    script_tool = next((owner for pattern, owner in _SCRIPTS if pattern.search(word)), None)
    if program in _COMMANDS and start.rest:  # such as swift sft
        start.tool, commands_by_verb = _COMMANDS[program]
        start.verb = start.rest.pop(0)
        if start.verb not in commands_by_verb:
            problem = f"{program} {start.verb}: only {', '.join(commands_by_verb)} can be translated"
            raise ConfigError(problem, _EXAMPLE)
        start.command = commands_by_verb[start.verb]
    elif script_tool is not None:  # such as python sft.py
        start.tool = script_tool
    elif word.startswith("-"):
        _read_launcher_option(start, word)


def _read_launcher_option(start: _CommandStart, word: str) -> None:
    """Read an option of the launcher, and its value, which is the next word unless the option has a ``=``."""
    name, equals, value = word.lstrip("-").partition("=")
    rest = start.rest
    # Options without a value come before another option or the script. The word after -m names the module.
    has_value = bool(rest) and not rest[0].startswith("-") and not rest[0].endswith(".py") and name != "m"
    if not equals and has_value:
        value = rest.pop(0)
    if name in _PROCESS_OPTIONS and value.isdigit():
        start.num_processes = int(value)
    elif name == "config_file" and os.path.exists(value):  # of accelerate
        num_processes = load_config_file(value).get("num_processes")
        if isinstance(num_processes, int):
            start.num_processes = num_processes


def _read_options(words: Sequence[str], tool: str) -> dict[str, Any]:
    """Return the values that options and configuration files on a command line give.

    ``FILE`` and ``NAME=VALUE`` come before the first option; then all words up to the next option are values of an
    option. A value is a text, a list of texts if several words follow a name, and True if none follows. Options take
    precedence over files, and later files over earlier ones.
    """
    values: dict[str, Any] = {}
    words_by_name: dict[str, list[Any]] = {}
    last_option = None
    for word in words:
        if word.startswith("--"):
            dashed_name, equals, value = word.removeprefix("--").partition("=")
            last_option = dashed_name.replace("-", "_")
            words_by_name[last_option] = [value] if equals else []
        elif last_option is not None:
            words_by_name[last_option].append(word)
        elif word.endswith((".yaml", ".yml", ".json")):
            values |= load_config_file(word)
        elif "=" in word:
            name, _, text = word.partition("=")
            words_by_name[name.lstrip("+")] = [parse_yaml(text)]  # +NAME=VALUE is the same
        else:
            raise ConfigError(f"unexpected word {word!r} in the command line of {tool}")
    for path in words_by_name.pop("config", []):  # of --config
        values |= load_config_file(path)
    for option, items in words_by_name.items():
        values[option] = _option_value(items)
    return values


def _option_value(items: list[Any]) -> Any:
    """Return the value of an option with these words: True for none, a single word, or the list."""
    if not items:
        return True
    return items[0] if len(items) == 1 else items
