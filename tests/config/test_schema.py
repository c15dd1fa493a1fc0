"""Schemas accept what packtool accepts, and refuse misspelled keys and wrong types."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from jsonschema import Draft7Validator

from packtool.cli.main import run
from packtool.config import mixture
from packtool.config.commands import SchemaName
from packtool.config.data import ExportConfig
from packtool.config.mixture import MixOptions, parse_recipe
from packtool.config.schema import schema_of, schema_text
from packtool.config.settings import _check_bounds, _convert, declared_type, parse_yaml
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"
NAMES: tuple[SchemaName, ...] = get_args(SchemaName)
# Values of YAML files, of which each option accepts some.
VALUES = [
    *(True, False, "yes", "No", "off", "auto", "none", "true", "first_exhausted"),
    *(0, 1, 2, 4, 16, 42, 4096, -1, 0.1, 0.5, 1.0, 1e-5, 1e9, "8K", "8k", "1M", "200GB", "1.5 TiB", "1e-4", "12", "-3"),
    *("lora", "model", "", [], ["a", "b"], [1, 2], ["a", ["b"]], {"a": 1}, '{"a": 1}', {"a": {"b": [1]}}, "bfloat16"),
]


def is_accepted(value: Any, field: dataclasses.Field[Any], cls: type) -> bool:
    """Return whether packtool accepts a value of an option in a YAML file."""
    try:
        _check_bounds(_convert(value, declared_type(field, cls)), field)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("name", "cls"), [("train", TrainConfig), ("export", ExportConfig)])
def test_the_schema_accepts_what_packtool_accepts(name: SchemaName, cls: type) -> None:
    properties = schema_of(name)["properties"]
    num_accepted = num_refused = 0
    for field in dataclasses.fields(cls):
        for option in (field.name, *field.metadata["aliases"]):
            validator = Draft7Validator(properties.pop(option))
            assert validator.is_valid(None)
            for value in VALUES:
                if is_accepted(value, field, cls):
                    num_accepted += 1
                    assert validator.is_valid(value), f"{option}: {value!r}"
                else:
                    num_refused += not validator.is_valid(value)
    assert properties == {}
    assert num_accepted > 500
    assert num_refused > 500


def test_schemas_refuse_wrong_values_and_misspelled_names() -> None:
    wrong = [
        {"learning_rte": 1e-4},
        {"packing_length": "8X"},
        {"packing_length": 0},
        {"train_type": "lara"},
        {"packing": "maybe"},
        {"model": ["a"]},
    ]
    validator = Draft7Validator(schema_of("train"))
    assert [value for value in wrong if validator.is_valid(value)] == []
    assert validator.is_valid({"learning-rate": 1e-4, "packing_length": "8K", "tuner_type": "lora", "model": None})


def test_the_configurations_in_the_repository_are_valid() -> None:
    for path in (DOCS.parent / "configs").glob("*.yaml"):
        name: SchemaName = "train" if path.stem.endswith("_train") else "export"
        Draft7Validator(schema_of(name)).validate(parse_yaml(path.read_text()))


RECIPES = {
    "sources: [a, {path: b, samples: 2, max_length: 8K, max_pixels: 100352}]": False,
    "sources: [{path: a, samples: 3}, {path: b, samples: 0.5, loss_weight: 2, channel: x}]": True,
    "{sources: [a, b], temperature: 2, unit: tokens}": True,
    "stages: [{sources: [a], until: 30%}, {sources: [b], packing_length: 16K, sequence_parallel_size: 2}]": True,
    "stages: [{sources: [a], until: 500}, {sources: [a, b]}]": True,
    "sources: []": False,
    "sources: [{samples: 2}]": False,
    "sources: [{path: a, sample: 2}]": False,
    "sources: [{path: a, max_length: long}]": False,
    "{sources: [a], unit: words, temperature: 1}": False,
    "stages: [{sources: [a], until: later}, {sources: [b]}]": False,
    "{}": False,
}


@pytest.mark.parametrize("text", RECIPES)
def test_recipes(text: str) -> None:
    """The schema accepts every recipe that packtool accepts; only the first has a mistake that it cannot see."""
    try:
        parse_recipe(text, "mix.yaml", MixOptions())
        is_recipe = True
    except ConfigError:
        is_recipe = False
    assert is_recipe == RECIPES[text]
    validator = Draft7Validator(schema_of("mixture"))
    assert validator.is_valid(parse_yaml(text)) == (is_recipe or text == next(iter(RECIPES)))


def test_the_schema_of_recipes_has_all_keys() -> None:
    properties = schema_of("mixture")["properties"]
    assert set(properties) == {*mixture._RECIPE_KEYS, "stages"}
    stage = properties["stages"]["items"]["properties"]
    assert set(stage) == {*mixture._RECIPE_KEYS, *mixture._STAGE_KEYS}
    source = properties["sources"]["items"]["anyOf"][1]["properties"]
    assert set(source) == {*mixture.SOURCE_KEYS, *mixture._MEDIA_OPTIONS}


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_the_command_prints_the_published_schema(
    name: SchemaName, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schema", name]) == 0
    printed = json.loads(capsys.readouterr().out)
    Draft7Validator.check_schema(printed)
    assert printed == json.loads((DOCS / f"schema-{name}.json").read_text())
    assert run(["schema", name, "--output", str(tmp_path / "schema.json")]) == 0
    assert (tmp_path / "schema.json").read_text() == schema_text(name)
