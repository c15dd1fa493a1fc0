"""Translation of keys by ``compat_names.tsv``, ``values.tsv`` and ``defaults.tsv``, whose comments explain them."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from packtool.config.compat_names import TRANSFORMERS, CompatName, compat_names, find_entry_of_tool, in_our_unit
from packtool.config.settings import FALSE_WORDS, TRUE_WORDS, flag, parse_yaml, value_type
from packtool.config.train import TrainConfig
from packtool.errors import did_you_mean
from packtool.translate.read import FIELDS, OPTIONS, ForeignConfig, read_table

_DISABLED = ("", "none", "null", "[]", "{}", "0.0", *FALSE_WORDS)
# Unsupported arguments that change training; all others in a record of ms-swift's arguments are of other purposes.
_CHANGES_TRAINING = {
    *("loss_type", "optimizer"),
    *("new_special_tokens", "rope_scaling", "max_model_len", "label_smoothing_factor"),
}

_Rule = tuple[str, str]  # an effect and its text, as in values.tsv
_NOTHING: _Rule = ("used", "")
_VALUE = "{}"  # in the text of a rule: the value of its key


@dataclass
class Translation:
    """A configuration in packtool's options, with everything that the report and ``packtool translate`` show.

    Args:
        values, origins: by option (with underscores), its value, and its foreign names or the source of a default.
        defaults: options whose value is a default of the other tool.
        omitted: (name, reason) of keys without effect.
        problems: a sentence for each key that would change training and has no equivalent.
        environ: variables that the command needs.
    """

    source: ForeignConfig
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    defaults: list[str] = field(default_factory=list)
    omitted: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)

    def set(self, option: str, value: Any, origin: str) -> None:
        """Set an option, or one key of an object, as in ``training.tf32``; two different values are a problem."""
        option, _, key = option.partition(".")
        earlier = self.values.get(option)
        if key:
            value = {**(earlier or {}), key: value}
        elif option in self.values and as_text(earlier) != as_text(value):
            names = f"{self.origins[option]} and {origin}"
            self.problems.append(f"{names} set {flag(option)} to different values: remove one")
            return
        origins = {**dict.fromkeys(self.origins.get(option, "").split(", ")), origin: None}
        self.values[option], self.origins[option] = value, ", ".join(filter(None, origins))

    def default(self, option: str, value: Any, origin: str) -> None:
        """Set an option to the other tool's default, unless the configuration has a value."""
        if option not in self.values:
            self.values[option], self.origins[option] = value, origin
            self.defaults.append(option)

    def remove(self, option: str, reason: str) -> None:
        """Remove the value of an option, and record the key that it came from as one without effect."""
        del self.values[option]
        name = self.origins.pop(option)
        if option not in self.defaults:
            self.omitted.append((name, reason))
        self.defaults = [each for each in self.defaults if each != option]

    def refuse(self, name: str, reason: str) -> None:
        """Record a key that would change training and has no equivalent."""
        problem = f"{name} ({self.source.tool}): {reason}"
        if problem not in self.problems:
            self.problems.append(problem)

    def get(self, option: str) -> Any:
        """Return the value of an option, or packtool's default."""
        return self.values.get(option, getattr(TrainConfig, option, None))

    def translate_object(self, name: str, items: Mapping[str, Any]) -> None:
        """Translate an object key by key, as ``qat.weight_dtype``; empty values mean that a key is absent."""
        for key, value in items.items():
            if isinstance(value, dict):
                self.translate_object(f"{name}.{key}", value)
            elif value:
                self.translate_key(f"{name}.{key}", value)

    def translate_key(self, name: str, value: Any) -> None:
        """Translate one key by the first line for its value in ``values.tsv``, else by ``compat_names.tsv``."""
        if value is None or (self.source.is_record and value in ([], {}, "")):
            return
        rule = self._find_rule(name, as_text(value).lower())
        entry = find_entry_of_tool(name, self.source.tool, self.source.command)
        if rule is None and entry is not None:
            rule = self._rule_of_entry(entry, name, value)
        if rule is not None:
            self._apply_rule(rule, name, value)
        elif self.source.is_record:
            self.omitted.append((name, "a derived value"))
        else:
            known_names = [each.name for each in compat_names() if each.tool in (self.source.tool, TRANSFORMERS)]
            self.refuse(name, f"unknown setting{did_you_mean(name, known_names)}")

    def _find_rule(self, name: str, value: str) -> _Rule | None:
        """Return the rule in the first line of ``values.tsv`` that matches a key."""
        for tool, names, values, condition, effect, text in read_table("values.tsv"):
            is_of_key = tool in ("*", self.source.tool) and _matches(name, names)
            if is_of_key and _matches(value, values) and self._holds(condition):
                return effect, text
        return None

    def _holds(self, condition: str) -> bool:
        """Return whether all tests of a condition are true."""
        tests = [] if condition == "-" else condition.split(" ")
        for test in tests:
            key, _, alternatives = test.partition("=")
            is_equal = _matches(as_text(self._value_of(key.removesuffix("!"))).lower(), alternatives.replace("|", " "))
            if is_equal == key.endswith("!"):  # as in KEY!=VALUE
                return False
        return True

    def _value_of(self, key: str) -> Any:
        """Return the value of a key in a condition."""
        if key.startswith("--"):
            return self.get(key.removeprefix("--").replace("-", "_"))
        value: Any = {**self.source.values, "config": self.source.model_config}
        for part in key.split("."):
            if isinstance(value, list):
                value = {str(position): item for position, item in enumerate(value)}
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def _rule_of_entry(self, entry: CompatName, name: str, value: Any) -> _Rule:
        """Return the rule that an entry of ``compat_names.tsv`` means for this value of its key."""
        is_off = as_text(value).strip().lower() in _DISABLED
        is_record = self.source.is_record  # has all arguments, most of which the user has not chosen
        if entry.status == "same":
            return "set", f"{OPTIONS[name]}={_VALUE}"
        if entry.status == "unneeded":
            return "omit", entry.reason
        if entry.status == "set":  # a field of transformers' TrainingArguments
            return _NOTHING if is_record else ("set", f"training.{name}={_VALUE}")
        if entry.status == "unsupported":
            is_harmless = is_off or (is_record and name not in _CHANGES_TRAINING)
            return _NOTHING if is_harmless else ("stop", f"not supported: {entry.reason}")
        # The key is renamed: ``entry.options`` has packtool's options for it.
        if is_off and entry.selects_a_value:
            return _NOTHING
        if "{per_epoch}" in entry.options:
            return self._interval_rule(name, value)
        assignments = _assignments(in_our_unit(entry.options, as_text(value)))
        return ("set", assignments) if assignments else ("stop", f"use {entry.options} instead; {entry.reason}")

    def _interval_rule(self, name: str, value: Any) -> _Rule:
        """Return the rule for a number of evaluations or checkpoints per epoch: their interval as part of the run."""
        option = "eval" if name.startswith("eval") else "save"
        num_epochs = self.number("num_epochs", self.source.values.get("num_epochs"), 1) or 1
        num_times = self.number(name, value, 0) * num_epochs
        if num_times > 1:
            return "set", f"{option}_steps={1 / num_times}"
        return ("set", f"{option}_strategy=epoch") if num_times else _NOTHING

    def _apply_rule(self, rule: _Rule, name: str, value: Any) -> None:
        """Translate a key by a rule."""
        effect, text = rule
        text = text.replace("{name}", name)
        for placeholder, key, default in re.findall(r"(\{(.+?)\|(.*?)\})", text):
            text = text.replace(placeholder, ",".join(split_list(self._value_of(key) or default)))
        if effect == "set":
            for assignment in text.split(" "):
                option, _, text_value = assignment.partition("=")
                new_value = value if text_value == _VALUE else text_value.replace(_VALUE, as_text(value))
                self.set(option, _convert(option, new_value), name)
        elif effect == "omit":
            self.omitted.append((name, text))
        elif effect == "stop":
            self.refuse(f"{name}: {as_text(value)}", text)

    def add_defaults(self) -> None:
        """Add the tool's defaults from ``defaults.tsv`` whose condition holds, in the order of the table."""
        for tool, option, text, condition, origin in read_table("defaults.tsv"):
            if tool == self.source.tool and self._holds(condition):
                self.default(option, parse_yaml(text), origin)

    def remove_conflicts(self) -> None:
        """Remove options that other options make unnecessary or impossible (tool ``packtool`` in ``values.tsv``)."""
        for tool, option, values, condition, _, reason in read_table("values.tsv"):
            is_set = tool == "packtool" and option in self.values
            if is_set and _matches(as_text(self.values[option]).lower(), values) and self._holds(condition):
                self.remove(option, reason)

    def number(self, name: str, value: Any, default: float) -> float:
        """Return a value as a number; ``default`` if it is null, and also a problem if it is no number."""
        if value is None:
            return default
        with contextlib.suppress(TypeError, ValueError):
            if math.isfinite(number := float(value)):
                return number
        self.refuse(name, f"{value!r} is not a number")
        return default

    def restrict(self, options: Iterable[str], command: str) -> None:
        """Remove values of options that ``packtool COMMAND`` does not have, and checkpoint directories of an export."""
        known = set(options)
        if command == "export" and self.source.command == "train":
            known.discard("output_dir")
        for option in [option for option in self.values if option not in known]:
            self.remove(option, f"packtool {command} does not need it")


def as_text(value: Any) -> str:
    """Return a value as on a command line: ``true`` for True, items of a list with spaces between them."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(as_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_true(value: Any) -> bool:
    """Return whether a value of YAML or a command line means true."""
    return as_text(value).lower() in TRUE_WORDS


def split_list(value: Any) -> list[str]:
    """Return the items of a list, or of a text with commas or spaces between them; items may end with a comma."""
    if isinstance(value, (list, tuple)):
        return [str(item).rstrip(",") for item in value]
    return [item for item in re.split(r"[,\s]+", str(value)) if item]


def _matches(text: str, patterns: str) -> bool:
    """Return whether a text matches one of the patterns, which have spaces between them."""
    return any(fnmatchcase(text, pattern) for pattern in patterns.split(" "))


def _assignments(options: str) -> str:
    """Convert options such as ``--packing and --fsdp full_shard`` to ``packing={} fsdp=full_shard``."""
    words = re.findall(r"--([a-z0-9-]+)(?: (?!and\b)(\S+))?", options)
    return " ".join(f"{option.replace('-', '_')}={value or '{}'}" for option, value in words)


def _convert(option: str, value: Any) -> Any:
    """Return a value in the type of an option: the number or boolean of a text, a list of a single item."""
    if option == "training.optim_target_modules":
        names = split_list(value)
        return ["attn", "mlp"] if names == ["all"] else names  # linear layers in transformers' names, without the head
    if option == "trainable_parameters_regex":
        return "|".join(split_list(value))
    if option == "columns":
        return [value]
    if option in ("fsdp", "target_modules", "target_parameters", "modules_to_save", "adapters", "report_to"):
        return split_list(value)
    if isinstance(value, str) and option in FIELDS and value_type(*FIELDS[option]) in (bool, int, float):
        parsed = parse_yaml(value)
        return parsed if isinstance(parsed, (bool, int, float)) else value
    return value
