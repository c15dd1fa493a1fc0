"""JSON Schemas of options and of recipes, with which editors complete and check YAML files.

A schema accepts every value that packtool accepts; some wrong values are only refused by packtool.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from packtool.config.commands import SchemaName
from packtool.config.data import ExportConfig, MediaOptions
from packtool.config.mixture import SOURCE_KEYS, UNITS
from packtool.config.settings import (
    FALSE_WORDS,
    TRUE_WORDS,
    Synonyms,
    annotations_of,
    declared_type,
    num_bytes,
    num_tokens,
    recomputed_layers,
    steps_or_fraction,
    value_type,
)
from packtool.config.train import TrainConfig

Schema = dict[str, Any]

_DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest one that YAML editors support completely
_DASHED_NAME = "^[a-z0-9]+(-[a-z0-9]+)+$"  # packtool also reads names with dashes; they are not checked
_NUMBER = r"^\s*[-+]?[0-9.][0-9.eE_+-]*\s*$"
_TOKENS = r"^\s*\d+(\.0*)?[kKmM]?\s*$"
_BYTES = r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]?[iI]?[bB]?)\s*$"
_SHARE = r"^\s*\d+(\.\d+)?\s*%\s*$"


def schema_of(name: SchemaName) -> Schema:
    """Return the schema of the files of ``packtool train --config``, ``packtool export --config`` or ``--mix``."""
    if name == "mixture":
        return {"$schema": _DRAFT, "title": "Recipe of packtool --mix", **_mixture_schema()}
    cls = TrainConfig if name == "train" else ExportConfig
    properties = {}
    for field in dataclasses.fields(cls):
        for option_name in (field.name, *field.metadata["aliases"]):
            properties[option_name] = _option_schema(field, cls)
    options = {**_closed_object(properties), "patternProperties": {_DASHED_NAME: {}}}
    return {"$schema": _DRAFT, "title": f"Options of packtool {name}", **options}


def schema_text(name: SchemaName) -> str:
    """Return a schema as the text of its published file, ``docs/schema-NAME.json``."""
    return json.dumps(schema_of(name), indent=1) + "\n"


def _closed_object(properties: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """Return the schema of a mapping with these keys and no others."""
    schema: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def _option_schema(field: dataclasses.Field[Any], cls: type) -> Schema:
    """Return the schema of an option's value, with its help and its default."""
    schema: Schema = {"description": field.metadata["help"], **_value_schema(field, cls)}
    if field.default not in (None, dataclasses.MISSING, (), ""):
        schema["default"] = field.default
    return schema


def _value_schema(field: dataclasses.Field[Any], cls: type) -> Schema:
    """Return the schema of the values of an option's declared type; null leaves an option unset."""
    annotations = annotations_of(declared_type(field, cls))
    plain_type = value_type(field, cls)
    generic = typing.get_origin(plain_type)  # None for ``int``, ``str``, ...
    if generic is Literal:
        return _choices_schema(typing.get_args(plain_type), annotations)
    if generic is tuple:  # a single value is a tuple of one
        item: Schema = {"type": ["string", "number", "boolean"]}
        return {"type": ["array", "string", "number", "boolean", "null"], "items": item}
    if generic is Mapping:
        return {"type": ["object", "string", "null"]}  # a string is read as JSON
    if plain_type is str:
        return {"type": ["string", "number", "boolean", "null"]}
    if recomputed_layers in annotations:  # parses a boolean, auto, or a number of layers
        return {"type": ["boolean", "integer", "string", "null"], "minimum": 0}
    if plain_type is bool:
        return _words_schema([True, False], [*TRUE_WORDS, *FALSE_WORDS])
    return _number_schema(field, plain_type, annotations)


def _choices_schema(choices: Iterable[str], annotations: Iterable[Any]) -> Schema:
    """Return the schema of a choice of words, their synonyms, and the booleans and numbers that stand for words."""
    values: list[Any] = list(choices)
    synonyms: list[str] = []
    for annotation in annotations:
        if isinstance(annotation, Synonyms):
            synonyms += annotation.words
    values += [value for value in (True, False) if str(value).lower() in (*values, *synonyms)]
    return _words_schema(values, synonyms)


def _words_schema(values: list[Any], synonyms: list[str]) -> Schema:
    """Return the schema of values that editors suggest, and of synonyms in any case, which they accept."""
    spellings = "|".join("".join(f"[{letter}{letter.upper()}]" for letter in word) for word in synonyms)
    numbers = [int(word) for word in (*values, *synonyms) if str(word).isdecimal()]
    accepted: list[Schema] = [{"enum": values}, {"enum": [*numbers, None]}]
    if synonyms:
        accepted.append({"type": "string", "pattern": f"^({spellings})$"})
    return {"anyOf": accepted}


def _number_schema(field: dataclasses.Field[Any], number_type: type, annotations: Iterable[Any]) -> Schema:
    """Return the schema of a number, which may also be a text, with its bounds."""
    schema: Schema = {"type": ["number" if number_type is float else "integer", "string", "null"], "pattern": _NUMBER}
    for annotation in annotations:
        if annotation is num_tokens:
            schema["pattern"] = f"{_NUMBER}|{_TOKENS}"
        elif annotation is num_bytes:
            schema["pattern"] = f"{_NUMBER}|{_BYTES}"
        elif annotation is steps_or_fraction:
            schema["type"][0] = "number"
    for bound in ("minimum", "maximum"):
        if field.metadata[bound] is not None:
            schema[bound] = field.metadata[bound]
    return schema


_POSITIVE: Schema = {"type": "number", "exclusiveMinimum": 0}
_LENGTH: Schema = {"type": ["integer", "string", "null"], "minimum": 1, "pattern": _TOKENS}
_TEXT: Schema = {"type": ["string", "null"]}
_UNIT: Schema = {"enum": list(UNITS)}
_SOURCE_VALUES: dict[str, Schema] = {
    "path": {"type": "string", "minLength": 1, "description": "Directory of a cache."},
    **{unit: {**_POSITIVE, "description": f"Weight of the source in {unit.replace('_', ' ')}."} for unit in UNITS},
    "loss_weight": {**_POSITIVE, "description": "Factor of the losses of its samples."},
    "loss_scale": {**_TEXT, "description": "Rule that selects its trained tokens."},
    "min_length": {**_LENGTH, "description": "Leave out samples of fewer tokens."},
    "max_length": {**_LENGTH, "description": "Leave out samples of more tokens."},
    "channel": {**_TEXT, "description": "Name of its losses in logs."},
}


_STAGE_VALUES: dict[str, Schema] = {  # of the keys that only a stage has
    "until": {
        "type": ["integer", "string", "null"],
        "minimum": 1,
        "pattern": _SHARE,
        "description": "End of the stage: an optimizer step, or a share of the run such as 30%.",
    },
    "packing_length": {**_LENGTH, "description": "Maximum tokens of a pack in this stage."},
    "sequence_parallel_size": {"type": ["integer", "null"], "minimum": 1, "description": "Processes per sequence."},
}


def _mixture_schema() -> Schema:
    """Return the schema of a recipe with or without stages."""
    media_limits = {field.name: _option_schema(field, MediaOptions) for field in dataclasses.fields(MediaOptions)}
    source = _closed_object({**{key: _SOURCE_VALUES[key] for key in SOURCE_KEYS}, **media_limits}, ["path"])
    recipe: dict[str, Schema] = {
        "sources": {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string", "minLength": 1}, source]}},
        "temperature": {**_POSITIVE, "description": "Weights are size^(1/T): 1 keeps proportions, more evens them."},
        "unit": {**_UNIT, "description": "Unit of the sizes for temperature."},
    }
    stages: Schema = {"type": "array", "minItems": 1, "items": _closed_object({**recipe, **_STAGE_VALUES})}
    return {
        **_closed_object({**recipe, "stages": stages}),
        "anyOf": [{"required": ["sources"]}, {"required": ["stages"]}],
    }
