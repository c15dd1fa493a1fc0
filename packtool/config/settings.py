"""Declaration of settings, conversion of their values, and merging of flags, environment variables and YAML.

A setting is declared once, as a field of a frozen dataclass, from which the command line makes its options. A value
comes from the first of: a flag, ``--set key=value``, an environment variable, the file of ``--config``, the default.

YAML is read by the rules of YAML 1.2 (core schema, section 10.3). PyYAML follows YAML 1.1, which reads ``1e-6`` as a
text and ``no`` as a boolean. In YAML 1.2 ``1e-6`` is a number, ``no`` a word (as are ``12:30`` and ``2024-01-01``), and
only ``true`` and ``false`` are booleans; ``_convert`` turns words into booleans where an option is declared as one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args

from packtool.config.codes import SEVERAL_PROBLEMS
from packtool.errors import ConfigError, did_you_mean

_TOO_DEEP = "lists and objects nest too deeply"


def num_tokens(text: str) -> int:
    """Parse a number of tokens: ``8192``, ``8k``, ``1M``; K is 1024, M is 1024 K; ValueError for other texts."""
    match = re.fullmatch(r"(\d+)([km]?)", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is not a number of tokens; give one such as 8192 or 8K")
    return int(match[1]) * 1024 ** " km".index(match[2].lower() or " ")


def num_bytes(text: str) -> int:
    """Parse a number of bytes: ``200GB``, ``1.5 TiB``, ``1000000``; ValueError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; give one such as 200GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


def format_bytes(num: int) -> str:
    """Format a number of bytes in the largest unit that divides it: ``1KB`` for 1000, ``4KiB`` for 4096, ``80``."""
    sizes = {1: ""}
    for power, letter in enumerate("KMGT", 1):
        sizes |= {1000**power: f"{letter}B", 1024**power: f"{letter}iB"}
    largest = max(size for size in sizes if num % size == 0)
    return f"{num // largest}{sizes[largest]}"


def steps_or_fraction(raw: object) -> float:
    """Parse a number of steps (an int), or a fraction of all steps (a float below 1); ValueError for other values."""
    number = float(_to_number(raw, float, None))
    if number >= 1 and number.is_integer():
        return int(number)
    if 0 < number < 1:
        return number
    raise ValueError(f"{raw!r} is neither a number of steps, at least 1, nor a fraction of all steps, such as 0.1")


def recomputed_layers(raw: object) -> bool | int | str:
    """Parse ``true``, ``false``, ``auto`` or a number of layers, at least 2; ValueError for other values."""
    word = str(raw).lower()
    if word in TRUE_WORDS + FALSE_WORDS:
        return word in TRUE_WORDS
    if word != "auto" and not word.isdecimal():
        raise ValueError(f"{raw!r} is none of true, false, auto, and a number of layers")
    return word if word == "auto" else int(word)


Steps = Annotated[float, steps_or_fraction]
"""Type of settings that count steps: ``500``, or ``0.1`` for a tenth of all steps."""

RecomputedLayers = Annotated[bool, recomputed_layers]
"""Type of a flag that also accepts ``auto`` or a number of layers, which are then a str or an int."""

Tokens = Annotated[int, num_tokens]
"""Type of settings that count tokens: ``8192`` or ``8K``."""

Bytes = Annotated[int, num_bytes]
"""Type of settings that count bytes: ``1000000`` or ``200GB``."""

_UNITS: dict[Any, str] = {num_tokens: "TOKENS", num_bytes: "BYTES", recomputed_layers: "true|false|auto|N"}

_BOOL, _INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp"))
_IS_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_IS_INT = re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|[0-9][0-9_]*)$")
_IS_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text; ``yaml.YAMLError`` if it is not YAML, or is nested too deeply."""
    import yaml  # here, because most runs need none of it

    try:
        return yaml.load(text, Loader=_loader())  # a SafeLoader with other resolvers
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise yaml.YAMLError(_TOO_DEEP if isinstance(error, RecursionError) else str(error)) from error


def load_json(text: str | bytes) -> Any:
    """Parse a JSON text; ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's loader with the scalars of YAML 1.2."""

    # A new table: the inherited one is shared by all loaders.
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _INT, _FLOAT, _TIME)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(_BOOL, _IS_BOOL, list("tTfF"))
    Loader.add_implicit_resolver(_INT, _IS_INT, list("-+0123456789"))
    Loader.add_implicit_resolver(_FLOAT, _IS_FLOAT, list("-+.0123456789"))
    return Loader


Panel = Literal[
    "Common options",
    "Options",
    "Model and hardware",
    "Mixtures",
    "Packing",
    "Training",
    "Optimizer",
    "Parameters",
    "Precision and memory",
    "Speed",
    "Steps",
    "Sequence parallel",
    "Evaluation",
    "Checkpoints and logs",
    "Rows",
    "Streaming",
    "Pictures",
    "Video and audio",
    "Shards and job arrays",
    "Media access",
    "Caches",
    "Other options",
]
PANELS: tuple[Panel, ...] = get_args(Panel)
COMMON, LAST = PANELS[0], PANELS[-1]
"""Headings of a command's ``COMMON_OPTIONS``, and of the options that every command has."""


T = TypeVar("T")
DescribeUnknown = Callable[[str, Any], str | None]
REQUIRED: Any = MISSING
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


@dataclass(frozen=True, eq=False)
class Synonyms:
    """Accepted synonyms for the values of a setting, such as those of other tools.

    ``refused`` has words without an equivalent value, with the reason and what to give instead.
    """

    words: Mapping[str, str]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


YES_OR_NO = Synonyms(dict.fromkeys(TRUE_WORDS, "true") | dict.fromkeys(FALSE_WORDS, "false"))
"""Synonyms of ``true`` and ``false`` for a setting that also has other values."""
NOT_AT_ALL = Synonyms(dict.fromkeys(FALSE_WORDS, "no"))
"""Synonyms of ``no`` for a setting that also has other values."""


def option(
    default: Any,
    help: str,
    *,
    panel: Panel | None = "Options",
    env: str | None = None,
    aliases: tuple[str, ...] = (),
    minimum: float | None = 1,
    maximum: float | None = None,
    path: bool = False,
    needs: tuple[str, str] | None = None,
) -> Any:
    """Declare a setting.

    Args:
        default: or ``REQUIRED``.
        help: at most 15 words for ``--help``; ``scripts/option_details.tsv`` has the rest for ``docs/options.md``.
        panel: heading under which ``--help`` shows it; None for a setting that only YAML and ``--set`` can set.
        env: environment variable that can also set it.
        aliases: other names of the option, such as ``tuner_type`` for ``train_type``.
        minimum, maximum: inclusive bounds of a number, which is at least 1 by default; None for no bound.
        path: ``--help`` shows PATH, not TEXT, as its value.
        needs: (another setting, its values separated by ``|``): without them, this setting has no effect.
    """
    metadata: dict[str, Any] = {"help": help, "panel": panel, "env": env, "aliases": aliases}
    metadata |= {"minimum": minimum, "maximum": maximum, "path": path, "needs": needs}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# ``option`` with the heading of a group of options.
access_option = functools.partial(option, panel="Media access")
cache_option = functools.partial(option, panel="Caches")
checkpoint_option = functools.partial(option, panel="Checkpoints and logs")
evaluation_option = functools.partial(option, panel="Evaluation")
memory_option = functools.partial(option, panel="Precision and memory")
mixture_option = functools.partial(option, panel="Mixtures")
model_option = functools.partial(option, panel="Model and hardware")
optimizer_option = functools.partial(option, panel="Optimizer")
packing_option = functools.partial(option, panel="Packing")
parallel_option = functools.partial(option, panel="Sequence parallel")
parameter_option = functools.partial(option, panel="Parameters")
picture_option = functools.partial(option, panel="Pictures")
row_option = functools.partial(option, panel="Rows")
shard_option = functools.partial(option, panel="Shards and job arrays")
speed_option = functools.partial(option, panel="Speed")
step_option = functools.partial(option, panel="Steps")
stream_option = functools.partial(option, panel="Streaming")
training_option = functools.partial(option, panel="Training")
video_option = functools.partial(option, panel="Video and audio")


def flag(name: str) -> str:
    """Return the option of a setting: ``--max-length`` for ``max_length``."""
    return "--" + name.replace("_", "-")


def option_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return a field's option and its aliases, such as ``("--train-type", "--tuner-type")``."""
    return tuple(flag(name) for name in (field.name, *field.metadata["aliases"]))


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return True if a setting has no default."""
    return field.default is MISSING and field.default_factory is MISSING


_type_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def declared_type(field: dataclasses.Field[Any], owner: type) -> Any:
    """Return the declared type of a field without its ``None``, but with annotations such as ``Synonyms``."""
    hint = _type_hints(owner)[field.name]
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def value_type(field: dataclasses.Field[Any], owner: type) -> Any:
    """Return the declared type of a field without its ``None`` and without annotations."""
    hint = declared_type(field, owner)
    return hint.__origin__ if annotations_of(hint) else hint


def annotations_of(hint: Any) -> tuple[Any, ...]:
    """Return the annotations of a type, such as ``Synonyms``."""
    return tuple(getattr(hint, "__metadata__", ()))


def unit_of(field: dataclasses.Field[Any], owner: type) -> str | None:
    """Return the unit that ``--help`` shows for a number with suffixes; None for other types."""
    annotations = annotations_of(declared_type(field, owner))
    return next((_UNITS[annotation] for annotation in annotations if annotation in _UNITS), None)


def resolve(
    cls: type[T],
    flags: Mapping[str, Any],
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    describe_unknown: DescribeUnknown | None = None,
    warn: Callable[[str], None] = lambda _: None,
    source_problems: Sequence[str] = (),
) -> T:
    """Merge the given values of all sources into settings of class ``cls``; the ConfigError names all invalid ones.

    If ``cls`` has a class method ``complete``, it turns the given values into those of the fields.

    Args:
        flags: values from the command line by field name; None means not given.
        sets: ``key=value`` texts of ``--set``, with values in YAML and dots for nested keys.
        describe_unknown: returns the error message for an unknown name and its value, or None to ignore it. By default,
            the message suggests the most similar name.
        warn: called with a message for each given setting that has no effect.
        source_problems: of the sources themselves, reported with those of their values.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems: list[str] = []
    entries = _collect_values(fields, flags, sets, environ or {}, file or {}, problems)
    values = _convert_values(cls, entries, describe_unknown, problems)
    given_names = {_field_name(key, fields) for _, key, _ in entries}
    for name, field in fields.items():
        if is_required(field) and name not in given_names:
            problems.append(f"{flag(name)} is missing: {field.metadata['help']}")
    if problems:
        raise ConfigError.from_problems([*source_problems, *problems])

    config = _checked_settings(cls, values, source_problems)
    for name in values:
        if fields[name].metadata["needs"]:
            _warn_without_effect(fields[name], config, warn)
    return config


def _convert_values(
    cls: type[T], entries: Sequence[tuple[str, str, Any]], describe_unknown: DescribeUnknown | None, problems: list[str]
) -> dict[str, Any]:
    """Convert (origin, key, value) entries to values by setting; messages about invalid ones go to ``problems``."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for origin, key, raw in entries:
        name = _field_name(key, fields)
        if name not in fields:
            message: str | None = f"unknown setting {key!r}{did_you_mean(name, fields)}"
            if describe_unknown is not None:
                message = describe_unknown(name, raw)
            if message is not None:
                problems.append(message if origin == key else f"{origin}: {message}")
            continue

        try:
            value = _convert(raw, declared_type(fields[name], cls))
            _check_bounds(value, fields[name])
        except ValueError as error:
            problems.append(f"{origin}: {error}")
            continue
        if isinstance(value, dict):  # mappings from several sources are merged
            value = {**values.get(name, {}), **value}
        values[name] = value
    return values


def _warn_without_effect(field: dataclasses.Field[Any], config: object, warn: Callable[[str], None]) -> None:
    """Warn of a given setting if the setting that it needs has another value."""
    name, (needed, required) = flag(field.name), field.metadata["needs"]
    actual = getattr(config, needed)
    if actual not in required.split("|"):
        warn(f"{name} has no effect with {flag(needed)} {actual}: it requires {flag(needed)} {required}")


def _field_name(key: str, fields: Mapping[str, dataclasses.Field[Any]]) -> str:
    """Return the name of a setting that may be given with dashes or by an alias."""
    name = key.replace("-", "_")
    return next((field.name for field in fields.values() if name in field.metadata["aliases"]), name)


def _checked_settings(cls: type[T], values: Mapping[str, Any], source_problems: Sequence[str]) -> T:
    """Make settings of valid values; the ConfigError names conflicts between them, and missing packages."""
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = getattr(cls, "complete", None)
    config = cls(**(values if complete is None else complete(values)))
    problems = [*source_problems, *getattr(config, "problems", list)(), *getattr(config, "missing_packages", list)()]
    if problems:
        raise ConfigError.from_problems(problems, code=SEVERAL_PROBLEMS)
    return config


def _collect_values(
    fields: Mapping[str, dataclasses.Field[Any]],
    flags: Mapping[str, Any],
    sets: Sequence[str],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    problems: list[str],
) -> list[tuple[str, str, Any]]:
    """Return (origin, key, value) of the values from all sources, in ascending order of precedence.

    An origin names a value in error messages. Messages about values that cannot be parsed are added to ``problems``.
    """
    values = [(f"--config, {key}", key, value) for key, value in file.items() if value is not None]
    for name, field in fields.items():
        env = field.metadata["env"]
        if env and environ.get(env):
            values.append((f"environment variable {env}", name, environ[env]))
    for item in sets:
        try:
            values.append(_parse_set(item))
        except ValueError as error:
            problems.append(f"--set {item}: {error}")
    for name, value in flags.items():
        if value is not None and value != ():
            origin = flag(name) if name in fields else name  # unknown options have the name that was given
            values.append((origin, name, value))
    return values


def _parse_set(item: str) -> tuple[str, str, Any]:
    """Return (origin, key, value) of an item of ``--set``; raise a ValueError if it is not ``key=value``."""
    key, equals, text = item.partition("=")
    if not equals:
        raise ValueError("expected key=value")
    import yaml  # here, because most runs need none of it

    try:
        value = parse_yaml(text) if text else None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    name, *nested_keys = key.split(".")  # ``--set a.b=1`` sets ``a`` to ``{b: 1}``
    for nested_key in reversed(nested_keys):
        value = {nested_key: value}
    return f"--set {key}", name, value


def part_of(cls: type[T], config: object, **overrides: Any) -> T:
    """Make options of class ``cls`` from equally named fields of ``config``, unless None, and ``overrides``."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    return cls(**{**values, **overrides})


def bound_problems(options: object) -> list[str]:
    """Return messages about options outside their declared bounds, for settings that ``resolve`` did not make."""
    problems = []
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        try:
            _check_bounds(getattr(options, field.name), field)
        except ValueError as error:
            problems.append(f"{option_names(field)[0]}: {error}")
    return problems


def _convert(raw: Any, declared: Any) -> Any:
    """Convert a YAML value, or a text from the command line or environment, to a declared type; else ValueError."""
    annotations = annotations_of(declared)  # ``Synonyms``, or a function that parses the values, such as ``num_tokens``
    plain_type = declared.__origin__ if annotations else declared
    generic = typing.get_origin(plain_type)  # ``Literal``, ``tuple`` or ``Mapping``; None for ``int``, ``str``, ...
    if generic is Literal:
        return _check_choice(_without_synonyms(_as_text(raw), annotations), typing.get_args(plain_type))
    if generic is tuple:
        return tuple(map(_as_text, raw if isinstance(raw, (list, tuple)) else [raw]))
    if generic is not None:  # a mapping
        return _to_mapping(raw)
    if plain_type is str:
        return _without_synonyms(_as_text(raw), annotations)
    parse = next((annotation for annotation in annotations if callable(annotation)), None)
    if parse in (recomputed_layers, steps_or_fraction):  # which parse all values, the others only those with a unit
        return parse(raw)
    return _to_bool(raw) if plain_type is bool else _to_number(raw, plain_type, parse)


def _without_synonyms(text: str, annotations: Sequence[Any]) -> str:
    """Return packtool's word for a synonym; raise a ValueError for a word that is refused with a reason."""
    for annotation in annotations:
        if isinstance(annotation, Synonyms):
            text = annotation.words.get(text.lower(), text)
            if text.lower() in annotation.refused:
                raise ValueError(f"{text}: {annotation.refused[text.lower()]}")
    return text


def _check_choice(text: str, choices: Sequence[str]) -> str:
    """Return a text that is one of the choices; else raise a ValueError."""
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}{did_you_mean(text.lower(), choices)}")
    return text


def _to_bool(raw: Any) -> bool:
    """Return true or false for a word such as ``yes``; 1 is true and 0 is false, but 1.0 is not."""
    word = str(raw).lower()
    if isinstance(raw, float) or word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(f"{raw!r} is neither true nor false")
    return word in TRUE_WORDS


def _as_text(raw: Any) -> str:
    """Return a single value as text, as on the command line: ``true`` for YAML's true."""
    if isinstance(raw, (Mapping, list, tuple)):
        raise ValueError(f"{raw!r} is not a single value")
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def _to_mapping(raw: Any) -> dict[str, Any]:
    """Return a mapping from names to values; a text is parsed as JSON."""
    if isinstance(raw, str):
        try:
            raw = load_json(raw)
        except ValueError as error:
            raise ValueError(f"{raw!r} is not a JSON object of names and values: {error}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"{raw!r} is not a mapping from names to values")
    return dict(raw)


def _to_number(raw: Any, number_type: type[int | float], parse_suffix: Callable[[str], int] | None) -> int | float:
    """Return a number of a type; ``parse_suffix`` reads texts with a suffix such as K."""
    try:
        number = float(raw) if not isinstance(raw, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) or (number_type is int and not number.is_integer()):
        if parse_suffix is not None and isinstance(raw, str):
            return parse_suffix(raw)
        raise ValueError(f"{raw!r} is not {'an integer' if number_type is int else 'a number'}")
    if number_type is float:
        if math.isinf(number):
            raise ValueError(f"{raw!r} is not finite")
        return number
    # A float would round integers above 2^53.
    is_exact = isinstance(raw, int) or (isinstance(raw, str) and not any(mark in raw for mark in ".eE"))
    return int(raw) if is_exact else int(number)


def _check_bounds(value: Any, field: dataclasses.Field[Any]) -> None:
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if low is not None and value < low:
        raise ValueError(f"{value} is below the minimum of {low}")
    if high is not None and value > high:
        raise ValueError(f"{value} is above the maximum of {high}")
