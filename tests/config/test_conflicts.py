"""Every rule of the table of conflicts holds for the options that it names, and says so."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from packtool.cli.main import _SETTINGS
from packtool.config.conflicts import Settings, _holds, conflict_table
from packtool.config.model import AdapterOptions, LearningOptions, MemoryOptions
from packtool.config.settings import value_type

RULES = conflict_table()
REQUIRED = {"model": "m", "dataset": ("r",), "output_dir": "o", "cached_dataset": ("c",), "directory": "d"}
REQUIRED |= {"output": "o.parquet", "adapter": "a"}
# Options whose values give these properties.
PROPERTIES: dict[str, dict[str, Any]] = {
    "is_part": {"finalize": True},
    "modules_to_save=*vision-tower*": {"modules_to_save": ("vision-tower",)},
    "modules_to_save=*aligner*": {"modules_to_save": ("aligner",)},
    "adapter_settings": {"train_type": "oft", "adapter_settings": {"r": 1}},
    "mixing": {"mix": "m.yaml"},
    "!mixing": {},
    "interleaves": {"mix_strategy": "interleave_once"},
    "names_caches": {"cached_dataset": ("c",)},
    "!names_caches": {"cached_dataset": (), "mix": None},
    "removes_padding": {},
    "!removes_padding": {"packing": False},
    "has_unpadded_batches": {"dynamic_batch_tokens": 64},
    "sequence_parallel_ranks>1": {"sequence_parallel_size": 2},
    "sequence_parallel_ranks=1": {},
    "computation_dtype=float16": {"torch_dtype": "float16"},
    "computation_dtype!=float32": {"bf16": True},
    "best_metric!=eval_loss,eval_perplexity,eval_token_accuracy,eval_loss/*": {"metric_for_best_model": "bleu"},
}


def commands_of(section: str) -> list[type]:
    """The settings of commands that inherit from a section."""
    return [cls for cls in set(_SETTINGS.values()) if section in {base.__name__ for base in cls.__mro__}]


def has_option(cls: type, name: str) -> bool:
    """Whether it is an option or a property of a command."""
    return hasattr(cls, name) or name in {field.name for field in dataclasses.fields(cls)}


def example(cls: type, name: str, operator: str, option_value: str, negation: str) -> dict[str, Any]:
    """Values of options for which an alternative of a condition holds."""
    if (key := f"{negation}{name}{operator}{option_value}") in PROPERTIES:
        return PROPERTIES[key]
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    kind = value_type(field, cls)
    if negation:
        return {name: field.default}
    if operator.startswith(">"):
        if option_value.isidentifier():
            return {name: 9, option_value: 9 if operator == ">=" else 8}
        return {name: ("a", "b") if typing.get_origin(kind) is tuple else float(option_value)}
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    candidates = [*choices, True, False, None, "", "x", 5, 2, 1, 0, 0.0, 0.5, ("a",), 8]
    if operator == "=":
        candidates = [word for word in option_value.split(",") if word] + candidates
    typed = [value for value in candidates if value is None or value in choices or type(value) is kind]
    typed += [value for value in candidates if typing.get_origin(kind) is tuple and isinstance(value, tuple)]
    blank: Any = object.__new__(cls)
    for value in typed:
        object.__setattr__(blank, name, value)
        if (value is not None or operator) and _holds(blank, "", name, operator, option_value):
            return {name: value}
    raise AssertionError(f"no value of {name} makes {name}{operator}{option_value} true")


@pytest.mark.parametrize("rule_index", range(len(RULES)))
def test_every_rule_reports_its_message(rule_index: int) -> None:
    """In some command that has the section, for each alternative of the last term."""
    section, terms, message = RULES[rule_index]
    applying = [
        cls for cls in commands_of(section) if all(any(has_option(cls, each[1]) for each in term) for term in terms)
    ]
    assert applying, "no command has all options of the condition"
    cls = applying[0]
    for negation, name, operator, value in terms[-1]:
        if not has_option(cls, name):
            continue
        values: dict[str, Any] = {}
        for term in terms[:-1]:
            values |= example(cls, term[0][1], term[0][2], term[0][3], term[0][0])
        values |= example(cls, name, operator, value, negation)
        needed = {f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING}
        config = cls(**{key: value for key, value in REQUIRED.items() if key in needed} | values)
        assert isinstance(config, Settings)
        beginning = message.partition("{")[0].strip() or message.rpartition("}")[2].strip()
        assert any(beginning in problem for problem in config.problems()), (values, config.problems())


def test_options_that_only_affect_memory_need_a_model() -> None:
    """A new one is added to the rule about ``--model`` and ``--fit``."""
    rule = next(terms for _, terms, message in RULES if "which estimate memory" in message)
    option_names = [field.name for part in (AdapterOptions, MemoryOptions) for field in dataclasses.fields(part)]
    learning = {field.name for field in dataclasses.fields(LearningOptions)}
    assert [each[1] for each in rule[-1]] == [name for name in option_names if name not in learning]


def test_rules_name_existing_options_and_values() -> None:
    for section, terms, _ in RULES:
        owners = commands_of(section)
        for _, name, operator, value in (each for term in terms for each in term):
            having = [cls for cls in owners if has_option(cls, name)]
            assert having, f"{section}: {name} is no option"
            for cls in having if operator in ("=", "!=") else ():
                field = next((field for field in dataclasses.fields(cls) if field.name == name), None)
                kind = None if field is None else value_type(field, cls)
                if typing.get_origin(kind) is typing.Literal:
                    assert set(value.split(",")) <= {*typing.get_args(kind), ""}, (section, name, operator, value)
