"""Translation of names and values of other tools into packtool's options.

Names come from ``config/compat_names.tsv``. Two tables add what names alone cannot say; their columns are separated by
tabs.

``values.tsv`` (the first line that matches decides):

    tool, names, values   a tool or *; names with * and ?; values as on a command line, with * and ?
    effect                set   set the options in ``text``, as in ``train_type=lora``; {} stands for the value
                          omit  no effect, for the reason in ``text``
                          stop  training would differ, for the reason in ``text``, which ends with an alternative

``defaults.tsv``: defaults of the tools that differ from packtool's: tool, option, value (YAML), condition
(``option=value`` or -), source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import resources
from typing import Any

from packtool.config.compat_names import EVERY_COMMAND, TRANSFORMERS, CompatName, compat_entries, compat_names
from packtool.config.data import ExportConfig
from packtool.config.settings import FALSE_WORDS, TRUE_WORDS, parse_yaml, value_type
from packtool.config.train import TrainConfig
from packtool.errors import did_you_mean
from packtool.translate.read import ForeignConfig

_DISABLED = ("", "none", "null", "[]", "{}", "0.0", *FALSE_WORDS)
_OPTIONS = {
    name.replace("-", "_"): each.name
    for cls in (ExportConfig, TrainConfig)
    for each in dataclasses.fields(cls)
    for name in (each.name, *each.metadata["aliases"])
}
# Unsupported arguments that change training; all others in a record of ms-swift's arguments are of other purposes.
_CHANGES_TRAINING = {
    *("loss_type", "optimizer"),
    *("new_special_tokens", "rope_scaling", "max_model_len", "label_smoothing_factor"),
}


@dataclass
class Translation:
    """A configuration in packtool's options, with everything that the report and ``packtool translate`` show.

    Args:
        source: the configuration of the other tool.
        values: by option, with underscores.
        origins: foreign name, or source of a default, by option.
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

    @property
    def tool(self) -> str:
        """Name of the tool as in ``compat_names.tsv``."""
        return self.source.tool

    def set(self, option: str, value: Any, origin: str) -> None:
        """Set an option; two names that set it to different values are a problem."""
        if option == "training":
            value = {**self.values.get(option, {}), **value}
        elif option in self.values and as_text(self.values[option]) != as_text(value):
            self.problems.append(
                f"{self.origins[option]} and {origin} set --{option.replace('_', '-')} to different values: remove one"
            )
            return
        self.values[option], self.origins[option] = value, origin

    def default(self, option: str, value: Any, origin: str) -> None:
        """Set an option to the other tool's default, unless the configuration has a value."""
        if option not in self.values:
            self.values[option], self.origins[option] = value, origin
            self.defaults.append(option)

    def omit(self, name: str, reason: str) -> None:
        """Record a key without effect."""
        self.omitted.append((name, reason))

    def remove(self, option: str, reason: str) -> None:
        """Remove the value of an option, and record the key that it came from as one without effect."""
        del self.values[option]
        self.omit(self.origins.pop(option), reason)

    def refuse(self, name: str, reason: str) -> None:
        """Record a key that would change training and has no equivalent."""
        self.problems.append(f"{name} ({self.tool}): {reason}")

    def get(self, option: str) -> Any:
        """Return the value of an option, or packtool's default."""
        return self.values.get(option, getattr(TrainConfig, option, None))

    def translate_key(self, name: str, value: Any) -> None:
        """Translate one key by the tables; null means that the key is absent.

        A rule for this value (``values.tsv``) takes precedence over the entry for the key (``compat_names.tsv``).
        """
        if value is None:
            return
        rule = _find_rule(self.tool, name, as_text(value))
        entry = _find_entry(self.tool, name, self.source.command)
        if rule is not None:
            self._apply_rule(rule, name, value)
        elif entry is not None:
            self._apply_entry(entry, name, value)
        elif self.source.is_record:  # which also has values that ms-swift computes
            self.omit(name, "a derived value")
        else:
            known_names = [each.name for each in compat_names() if each.tool in (self.tool, TRANSFORMERS)]
            self.refuse(name, f"unknown setting{did_you_mean(name, known_names)}")

    def _apply_rule(self, rule: tuple[str, str], name: str, value: Any) -> None:
        """Translate a key by a rule (effect, text) of ``values.tsv``."""
        effect, text = rule
        if effect == "set":
            for assignment in text.split(" "):
                option, _, new_value = assignment.partition("=")
                self.set(option, value if new_value == "{}" else _convert(option, new_value), name)
        elif effect == "omit":
            self.omit(name, text)
        else:
            self.refuse(f"{name}: {as_text(value)}", text)

    def _apply_entry(self, entry: CompatName, name: str, value: Any) -> None:
        """Translate a key by its entry in ``compat_names.tsv``."""
        is_off = as_text(value).strip().lower() in _DISABLED
        if entry.status == "same":
            self.set(_OPTIONS[name], _convert(_OPTIONS[name], value), name)
        elif entry.status == "unneeded":
            self.omit(name, entry.reason)
        elif entry.status == "set":
            if not self.source.is_record:
                self.set("training", {name: value}, name)
        elif entry.status == "unsupported":
            is_ignored = self.source.is_record and name not in _CHANGES_TRAINING
            if not is_off and not is_ignored:
                self.refuse(f"{name}: {as_text(value)}", f"not supported: {entry.reason}")
        else:
            self._set_entry_options(entry, name, value, is_off)

    def _set_entry_options(self, entry: CompatName, name: str, value: Any, is_off: bool) -> None:
        """Set packtool's options for a key with this value, as the text ``entry.options`` says.

        Each option in the text may be followed by a word, which tells how its value follows from the key's value::

            --max-length            the key's value
            --shuffle {not}         the opposite of the key's value
            --max-pixels {area}     the pixels of an image with the sides in the key's value
            --columns text=NAME     the word, with the key's value instead of NAME
            --report-to wandb       the word, unless the key's value disables the feature (``is_off``)
        """
        options_with_words = re.findall(r"--([a-z0-9-]+)(?: (?!and\b)(\S+))?", entry.options)  # "and" connects options
        if not options_with_words:
            self.refuse(name, f"use {entry.options} instead; {entry.reason}")
        for dashed_option, word in options_with_words:
            option = dashed_option.replace("-", "_")
            if not word:
                self.set(option, _convert(option, value), name)
            elif word == "{not}":
                self.set(option, is_off, name)
            elif word == "{area}":
                self.set(option, _area(as_text(value)), name)
            elif word.endswith("=NAME"):
                self.set(option, [f"{word.removesuffix('NAME')}{value}"], name)
            elif not is_off:
                self.set(option, _convert(option, word), name)

    def add_defaults(self) -> None:
        """Add the tool's defaults from ``defaults.tsv`` whose condition holds, in the order of the table."""
        for tool, option, text, condition, origin in _table("defaults.tsv"):
            name, _, wanted = condition.partition("=")
            if tool == self.tool and (condition == "-" or as_text(self._condition_value(name)) == wanted):
                self.default(option, parse_yaml(text), origin)

    def _condition_value(self, name: str) -> Any:
        return self.source.values.get("stage") or "sft" if name == "stage" else self.get(name)

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
        unknown = [option for option in self.values if option not in known]
        for option in unknown:
            name = self.origins.pop(option)
            del self.values[option]
            if option not in self.defaults:
                self.omit(name, f"packtool {command} does not need it")
        self.defaults = [option for option in self.defaults if option in known]


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


def translate_ratio(translation: Translation, values: dict[str, Any], name: str) -> None:
    """Translate a ratio of validation rows, which is a number of rows if it is at least 1."""
    if (size := translation.number(name, values.pop(name, None), 0)) >= 1:
        translation.refuse(f"{name}: {size:g}", "a number of rows is not supported; give a ratio such as 0.1")
    elif size:
        translation.set("split_dataset_ratio", size, name)


_FIELDS = {each.name: (each, cls) for cls in (ExportConfig, TrainConfig) for each in dataclasses.fields(cls)}


def _convert(option: str, value: Any) -> Any:
    """Return a value in the type of an option: the number or boolean of a text, a list of a single item."""
    option_field, cls = _FIELDS[option]
    option_type = value_type(option_field, cls)
    if option_type in (bool, int, float) and isinstance(value, str):
        parsed = parse_yaml(value) if value else value
        return parsed if isinstance(parsed, (bool, int, float)) else value
    if option in ("fsdp", "target_modules", "target_parameters", "modules_to_save", "adapters", "report_to"):
        return split_list(value)
    return value


def _area(sides: str) -> int:
    """Return the pixels of an image from the sides in a text: one side of a square, or two sides."""
    numbers = [int(side) for side in re.findall(r"\d+", sides)]
    if len(numbers) == 1:
        return numbers[0] ** 2
    return math.prod(numbers)


def _find_entry(tool: str, name: str, command: str) -> CompatName | None:
    """Return the entry of a name for a tool, else that of transformers' TrainingArguments, which all tools take."""
    entries = [entry for entry in compat_entries(name) if entry.command in (EVERY_COMMAND, command)]
    entries_by_owner = [entry for owner in (tool, TRANSFORMERS) for entry in entries if entry.tool == owner]
    return next((entry for entry in entries_by_owner if not entry.is_variable), None)


def _find_rule(tool: str, name: str, value: str) -> tuple[str, str] | None:
    """Return (effect, text) of the first matching line of ``values.tsv``."""
    for owner, names, values, effect, text in _table("values.tsv"):
        is_named = owner in ("*", tool) and any(fnmatchcase(name, each) for each in names.split(" "))
        if is_named and any(fnmatchcase(value.lower(), each) for each in values.split(" ")):
            return effect, text
    return None


@functools.cache
def _table(name: str) -> tuple[tuple[str, ...], ...]:
    text = resources.files("packtool.translate").joinpath(name).read_text(encoding="utf-8")
    return tuple(tuple(line.split("\t")) for line in text.splitlines() if line and not line.startswith("#"))
