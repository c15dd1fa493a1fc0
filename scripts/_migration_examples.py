"""Example configurations of ms-swift, LLaMA-Factory, axolotl and TRL, read from checkouts of these projects."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

# A file of each project that identifies its checkout.
MARKERS = {
    "ms-swift": "swift/cli/sft.py",
    "LLaMA-Factory": "src/llamafactory/launcher.py",
    "axolotl": "src/axolotl/train.py",
    "TRL": "trl/scripts/sft.py",
}
NOT_TRAINING = "no training command"
_PREFERENCE = "preference or reward training, or reinforcement learning"
_HEAD = "trains a head for classification, embeddings or reranking, not a language model"
_CONVERTS = "converts or uploads a finished model and trains nothing"
_IN_PYTHON = "its settings are in Python code, not in a command line"
_FRAGMENT = "a fragment that names no model or no data"
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_EXPANSION = re.compile(r"\$\(\((?P<sum>[^)]*)\)\)|\$\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\}|\$(?P<plain>\w+)")
_QUOTED = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
_LEFT_OUT = re.compile(rf"(?P<quoted>{_QUOTED})|(?:(?<=\s)|^)#[^\n]*|(?<=\s)\d?>+\s*(?:&\d|\S+)")
_TOKEN = re.compile(rf"""[\n;&|]+|(?:{_QUOTED}|\\.|[^\s;&|\\'"])+""")
_DOCUMENTED = re.compile(r"\s*(?:\w+=\S+ )*(?:trl sft\b|(?:python|accelerate|uv run|hf jobs)\b.*\bsft\w*\.py)")
_FENCE = re.compile(r"^ *```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """Training configuration of another tool.

    Args:
        file: its path in the checkout; ``#2`` follows the second one of a file.
        words: the command line without environment variables; empty for a YAML file.
        settings: contents of the YAML file, or of the one that the command line reads; None without one.
        excluded: why it is not counted; empty if it is.
    """

    project: str
    file: str
    words: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    excluded: str = ""

    @property
    def option_values(self) -> dict[str, list[str]]:
        """Values of the command line's options by their names without dashes."""
        values: dict[str, list[str]] = {}
        name = None
        for word in self.words:
            if word.startswith("--"):
                name, _, value = word[2:].partition("=")
                values[name.replace("-", "_")] = [value] if value else []
            elif name is not None:
                values[name.replace("-", "_")].append(word)
        return values


def project_of(checkout: Path) -> str | None:
    """Return the project of a checkout, or None if it is none of the four."""
    return next((name for name, marker in MARKERS.items() if (checkout / marker).is_file()), None)


def find_examples(project: str, checkout: Path) -> list[Example]:
    """Return all examples of a checkout, also those that are not counted, in the order of their paths."""
    readers = {"ms-swift": _swift, "LLaMA-Factory": _llama_factory, "axolotl": _axolotl, "TRL": _trl}
    return list(readers[project](checkout))


def commands(script: str) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Yield the environment and the words of each command of a shell script, with its variables replaced.

    Comments, assignments and redirections are left out; nothing is executed.
    """
    script = _LEFT_OUT.sub(lambda match: match["quoted"] or "", script)
    script = re.sub(r"\\[ \t]*\n(?:\s*\n)*", " ", script)
    script = re.sub(r"\$\(expr ([^)]*)\)", lambda match: f"$(({match[1].replace(' ', '')}))", script)
    variables: dict[str, str] = {}
    words: list[str] = []
    for token in [*(match[0] for match in _TOKEN.finditer(script)), "\n"]:
        if set(token) - set("\n;&|"):
            words.append(_expand("".join(shlex.split(token)), variables))
            continue
        environ: dict[str, str] = {}
        while words and (words[0] == "export" or _ASSIGNMENT.fullmatch(words[0])):
            if match := _ASSIGNMENT.fullmatch(words.pop(0)):
                environ[match[1]] = match[2]
        if words:
            yield environ, tuple(words)
        else:
            variables |= environ
        words = []


def _expand(word: str, variables: Mapping[str, str]) -> str:
    """Replace variables and integer arithmetic; unknown variables without a default stay."""

    def value(match: re.Match[str]) -> str:
        if match["sum"] is not None:
            named = re.sub(r"(?<![$\w])([A-Za-z_]\w*)", r"$\1", match["sum"])
            first, *rest = re.findall(r"[/*]|\d+", _EXPANSION.sub(value, named))
            total = int(first)
            for operator, number in zip(rest[::2], rest[1::2], strict=True):
                total = total * int(number) if operator == "*" else total // int(number)
            return str(total)
        return variables.get(match["braced"] or match["plain"], match["default"] or match[0])

    return _EXPANSION.sub(value, word)


def _numbered(examples: list[Example]) -> Iterator[Example]:
    """Yield the examples of a file; all but the first get a number."""
    for number, example in enumerate(examples, 1):
        yield example if number == 1 else replace(example, file=f"{example.file}#{number}")


def _swift(checkout: Path) -> Iterator[Example]:
    for folder in ("train", "export"):
        for path in sorted((checkout / "examples" / folder).rglob("*.sh")):
            file = str(path.relative_to(checkout))
            examples = []
            for environ, words in commands(path.read_text(encoding="utf-8")):
                if (start := _swift_command(words)) is not None:
                    example = Example("ms-swift", file, words, environ)
                    config = next((word for word in words[start:] if word.endswith((".yaml", ".json"))), "")
                    is_file = bool(config) and words[words.index(config) - 1] in ("sft", "pt", "--config")
                    settings = yaml.safe_load((checkout / config).read_text("utf-8")) if is_file else None
                    examples.append(replace(example, settings=settings, excluded=_swift_excluded(example, start)))
            yield from _numbered(examples or [Example("ms-swift", file, excluded=NOT_TRAINING)])


def _swift_command(words: tuple[str, ...]) -> int | None:
    """Return the position of the subcommand (sft, pt, export, rlhf ...), or None for other programs."""
    for at, word in enumerate(words):
        if word.endswith("swift/cli/sft.py"):
            return at
        if word in ("swift", "megatron") and at + 1 < len(words):
            return at + 1
    return None


def _swift_excluded(example: Example, at: int) -> str:
    subcommand, values = example.words[at], example.option_values
    if example.words[at - 1] == "megatron":
        return "Megatron training"
    if subcommand == "rlhf":
        return _PREFERENCE
    if subcommand == "export" and "to_cached_dataset" not in values:
        return _CONVERTS
    if values.get("template_mode") == ["rlhf"]:
        return _PREFERENCE
    if subcommand not in ("sft", "pt", "export") and not subcommand.endswith("sft.py"):
        return "inference, deployment or evaluation"
    is_head = values.get("task_type", ["causal_lm"]) != ["causal_lm"] or "num_labels" in values
    return _HEAD if is_head else ""


def _llama_factory(checkout: Path) -> Iterator[Example]:
    examples = checkout / "examples"
    paths = [path for folder in (*examples.glob("train_*"), examples / "extras") for path in folder.rglob("*")]
    for path in sorted(path for path in paths if path.suffix in (".yaml", ".sh")):
        file = str(path.relative_to(checkout))
        if path.suffix == ".yaml":
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
            excluded = _llama_factory_excluded(settings)
            yield Example("LLaMA-Factory", file, settings=settings, excluded=excluded)
            continue
        found = []
        for environ, words in commands(path.read_text(encoding="utf-8")):
            if words[:2] == ("llamafactory-cli", "train"):
                example = Example("LLaMA-Factory", file, words, environ)
                stages = {name: values[-1] for name, values in example.option_values.items() if values}
                found.append(replace(example, excluded=_llama_factory_excluded(stages)))
            elif any(word.endswith("src/train.py") for word in words):
                settings = yaml.safe_load((checkout / words[-1]).read_text(encoding="utf-8"))
                found.append(Example("LLaMA-Factory", file, words, environ, settings))
        yield from _numbered(found or [Example("LLaMA-Factory", file, excluded=NOT_TRAINING)])


def _llama_factory_excluded(settings: Mapping[str, Any]) -> str:
    if "stage" not in settings:
        return NOT_TRAINING
    if settings["stage"] not in ("sft", "pt"):
        return _PREFERENCE
    # A configuration without do_train only tokenizes, if it names a place for the result.
    is_inference = settings.get("do_predict") and not settings.get("do_train")
    return "inference, deployment or evaluation" if is_inference else ""


def _axolotl(checkout: Path) -> Iterator[Example]:
    for path in sorted((checkout / "examples").rglob("*.y*ml")):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        excluded = ""
        if "base_model" not in settings:
            excluded = NOT_TRAINING
        elif any(settings.get(key) for key in ("rl", "reward_model", "process_reward_model", "ebft")):
            excluded = _PREFERENCE
        elif settings.get("num_labels"):
            excluded = _HEAD
        yield Example("axolotl", str(path.relative_to(checkout)), settings=settings, excluded=excluded)


def _trl(checkout: Path) -> Iterator[Example]:
    paths = [checkout / "README.md", *(checkout / "docs").rglob("*.md"), *(checkout / "trl").rglob("*.md")]
    paths += [*(checkout / "examples" / "scripts").glob("sft*.py"), checkout / "trl" / "scripts" / "sft.py"]
    for path in sorted(path for path in paths if path.is_file()):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            text = ast.get_docstring(ast.parse(text)) or ""
        yield from _numbered(list(_documented(str(path.relative_to(checkout)), text)))


def _documented(file: str, text: str) -> Iterator[Example]:
    """Yield the SFT commands of a documentation page or docstring; ``--config`` reads the last YAML block before."""
    logical = re.sub(r"\\[ \t]*\n", lambda match: " " * len(match[0]), text)  # offsets stay
    blocks = [
        (match.start(), yaml.safe_load(match["text"])) for match in _FENCE.finditer(text) if match["language"] == "yaml"
    ]
    offset = 0
    for line in logical.splitlines(keepends=True):
        if _DOCUMENTED.match(line):
            for environ, words in commands(line):
                example = Example("TRL", file, words, environ)
                values, before = example.option_values, [block for start, block in blocks if start < offset]
                has_config = "config" in values and before
                settings = before[-1] if has_config else None
                is_complete = settings is not None or {"model_name_or_path", "dataset_name"} <= values.keys()
                is_fragment = "..." in words or "trl" in words or "model_name_or_path" in values
                excluded = "" if is_complete else _FRAGMENT if is_fragment else _IN_PYTHON
                yield replace(example, settings=settings, excluded=excluded)
        offset += len(line)
