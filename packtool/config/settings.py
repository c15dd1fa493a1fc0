"""How settings are declared, and the one place where flags, environment and YAML become them.

A setting is declared once, as a field of a frozen dataclass (``packtool.config``); the command line builds its options
from the same declarations. A value is taken from the first of: a flag, ``--set key=value``, an environment variable,
the file given with ``--config``, the default. Every mistake found is reported in one ``ConfigError``.

What a value may look like follows from the declared type: ``Tokens`` and ``Bytes`` (``sizes``) take suffixes, booleans
take yes and no, and ``Annotated[..., Synonyms(...)]`` takes further words.

Numbers of tokens and of bytes as people write them, and the types of settings that are such numbers.

YAML and JSON of files and options; whatever they hold, what cannot be read raises the parser's own error.

YAML is as ``--config`` and ``--set`` have it: numbers and booleans as people write them.

PyYAML follows YAML 1.1, which takes ``1e-6`` for a text and ``no`` for a boolean. YAML 1.2 (core schema, section 10.3)
says what is meant: ``1e-6`` is a number, ``no`` a word (as are ``12:30`` and ``2024-01-01``), and only ``true`` and
``false`` are booleans; where an option wants a boolean, the word is turned into one by its declared type.

The headings that ``--help`` shows options under, in the order in which it shows them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args

from packtool.errors import ConfigError, did_you_mean

_BASES = ((1000, ""), (1024, "i"))
_POWERS = {"": 0, "k": 1, "m": 2}


@dataclass(frozen=True)
class Unit:
    """What a whole number counts, where people write it with a suffix.

    Args:
        letter: what ``--help`` shows for a value.
        parse: makes a number of text such as ``8K``; raises ValueError with what was expected.
    """

    letter: str
    parse: Callable[[str], int]


def num_tokens(text: str) -> int:
    """A number of tokens as people write it: ``8192``, ``8k``, ``26K``, ``1M``; K is 1024, M is 1024 K.

    Raises:
        ValueError: if it is none, or not positive.
    """
    match = re.fullmatch(r"(\d+)([km]?)", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is no number of tokens; write it as in 8192 or 8K")
    return int(match[1]) * 1024 ** _POWERS[match[2].lower()]


def num_bytes(text: str) -> int:
    """A size as people write it: ``200GB``, ``1.5 TiB``, ``1000000``.

    Raises:
        ValueError: if it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; write it as in 200GB")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))


def written_bytes(num: int) -> str:
    """A size in the largest unit that it is a whole number of: ``1KB`` for 1000, ``4KiB`` for 4096, ``80`` for 80."""
    sizes = [(base**power, f"{letter}{i}B") for power, letter in enumerate("KMGT", 1) for base, i in _BASES]
    size, unit = max(((size, unit) for size, unit in sizes if num % size == 0), default=(1, ""))
    return f"{num // size}{unit}"


Tokens = Annotated[int, Unit("TOKENS", num_tokens)]
"""Type of settings that count tokens: ``8192`` or ``8K``."""

Bytes = Annotated[int, Unit("BYTES", num_bytes)]
"""Type of settings that count bytes: ``1000000`` or ``200GB``."""


_DEEP = "lists and objects nest too deeply"
_BOOL, _INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp"))
_IS_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_IS_INT = re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|[0-9][0-9_]*)$")
_IS_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: if it is none.
    """
    import yaml  # here, because most runs need none of it

    try:
        return yaml.load(text, Loader=_loader())  # a SafeLoader with other resolvers
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise yaml.YAMLError(_DEEP if isinstance(error, RecursionError) else str(error)) from error


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: if it is none, or nests too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_DEEP) from error


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's with the plain scalars of YAML 1.2."""

    # A table of its own, for PyYAML's is shared by all loaders.
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in (_BOOL, _INT, _FLOAT, _TIME)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(_BOOL, _IS_BOOL, list("tTfF"))
    Loader.add_implicit_resolver(_INT, _IS_INT, list("-+0123456789"))
    Loader.add_implicit_resolver(_FLOAT, _IS_FLOAT, list("-+.0123456789"))
    return Loader


Panel = Literal[
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
    "Scale",
    "Media access",
    "Caches",
    "Other options",
]
PANELS: tuple[Panel, ...] = get_args(Panel)
FIRST, LAST = PANELS[0], PANELS[-1]
"""What a command needs first, whatever else its options are declared as; and what all commands have."""


T = TypeVar("T")
REQUIRED: Any = MISSING
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


@dataclass(frozen=True)
class Synonyms:
    """Further words for a setting's values: those of other tools, by what they mean here.

    Args:
        words: by which of the values does the same.
        refused: by the reason why none does, and what to give instead.
    """

    words: Mapping[str, str]
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __hash__(self) -> int:
        return hash((tuple(self.words.items()), tuple(self.refused.items())))


YES_OR_NO = Synonyms(dict.fromkeys(TRUE_WORDS, "true") | dict.fromkeys(FALSE_WORDS, "false"))
"""What people write for true and false, for a setting that has these words among others."""
NOT_AT_ALL = Synonyms(dict.fromkeys(FALSE_WORDS, "no"))
"""What people write for no, for a setting that has a choice of this name."""


def option(
    default: Any,
    help: str,
    *,
    panel: Panel = FIRST,
    env: str | None = None,
    aliases: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    flag: bool = True,
    needs: tuple[str, str] | None = None,
) -> Any:
    """Declare a setting.

    Args:
        default: its value when nobody gives one, or ``REQUIRED``.
        help: one line for ``--help`` and the reference.
        panel: heading under which ``--help`` shows it.
        env: environment variable that sets it too.
        aliases: other option names (``--tuner-type`` for ``--train-type``).
        minimum, maximum: inclusive bounds of a number.
        flag: False for settings that only YAML and ``--set`` can give.
        needs: another setting and its value, without which this one has no effect.
    """
    metadata = {
        "help": help,
        "panel": panel,
        "env": env,
        "aliases": aliases,
        "minimum": minimum,
        "maximum": maximum,
        "flag": flag,
        "needs": needs,
    }
    return (
        dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
        if _unhashable(default)
        else (dataclasses.field(default=default, metadata=metadata))
    )


def _unhashable(default: Any) -> bool:
    return isinstance(default, dict)


def flag(name: str) -> str:
    """A setting's name as the command line has it: ``--max-length`` for ``max_length``."""
    return "--" + name.replace("_", "-")


def option_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The command line's names of a field, the main one first: ``("--train-type", "--tuner-type")``."""
    names = (field.name, *field.metadata["aliases"])
    return tuple(flag(name) for name in names)


@functools.cache
def _type_hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner, include_extras=True)


def value_type(field: dataclasses.Field[Any], owner: type) -> Any:
    """The declared type of a field without its ``None`` and without what is said about it."""
    return _plain(_declared(field, owner))


def unit_of(field: dataclasses.Field[Any], owner: type) -> Unit | None:
    """What a field's number counts, if it may be written with a suffix."""
    return next((note for note in _notes(_declared(field, owner)) if isinstance(note, Unit)), None)


def _declared(field: dataclasses.Field[Any], owner: type) -> Any:
    hint = _type_hints(owner)[field.name]
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _notes(hint: Any) -> tuple[Any, ...]:
    return tuple(getattr(hint, "__metadata__", ()))


def _plain(hint: Any) -> Any:
    return hint.__origin__ if _notes(hint) else hint


def resolve(
    cls: type[T],
    flags: Mapping[str, Any],
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    stranger: Callable[[str, Any], str | None] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> T:
    """Merge all sources into one checked ``cls``.

    A class method ``complete`` of ``cls``, where there is one, turns the given values into those of the fields: it sees
    which of them were given.

    Args:
        cls: ``ExportConfig`` or ``TrainConfig``.
        flags: values from the command line by field name; None means not given.
        sets: ``key=value`` strings, values in YAML's notation, dots for nested keys.
        environ: the environment.
        file: the parsed YAML file.
        stranger: asked what to say of an unknown name and its value; None where nothing needs to be said. By default
            the most similar name is suggested.
        tell: takes a warning for each given setting that has no effect.

    Raises:
        ConfigError: naming every setting that is wrong, and where it came from.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems: list[str] = []
    values: dict[str, Any] = {}
    refused: set[str] = set()
    for origin, key, raw in _all_given(fields, flags, sets, environ or {}, file or {}, problems):
        name = key.replace("-", "_")
        name = next((f.name for f in fields.values() if name in f.metadata["aliases"]), name)
        if name not in fields:
            unknown = f"unknown setting {key!r}{did_you_mean(name, fields)}"
            said = stranger(name, raw) if stranger is not None else unknown
            # A flag that nobody knows is its own origin.
            problems += [said if origin == key else f"{origin}: {said}"] if said is not None else []
            continue
        try:
            value = _convert(raw, _declared(fields[name], cls))
            _check_bounds(value, fields[name])
        except ValueError as error:
            problems.append(f"{origin}: {error}")
            refused.add(name)
            continue
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    problems += _missing([field for name, field in fields.items() if name not in values and name not in refused])
    if problems:
        raise ConfigError.from_problems(problems)
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = getattr(cls, "complete", None)
    config = cls(**(values if complete is None else complete(values)))
    found: list[str] = [*getattr(config, "problems", list)(), *getattr(config, "missing_packages", list)()]
    if found:
        raise ConfigError.from_problems(found)
    for warning in _unneeded(config, [fields[name] for name in values]):
        tell(warning)
    return config


def _missing(fields: Sequence[dataclasses.Field[Any]]) -> Iterator[str]:
    """A problem for each required setting among those that nobody gave."""
    for field in fields:
        if field.default is MISSING and field.default_factory is MISSING:
            yield f"{option_names(field)[0]} is missing: {field.metadata['help']}"


def _unneeded(config: object, given: Sequence[dataclasses.Field[Any]]) -> Iterator[str]:
    """A warning for each given setting that has no effect."""
    for field in given:
        needed, wanted = field.metadata["needs"] or (field.name, getattr(config, field.name))
        if (actual := getattr(config, needed)) != wanted:
            yield f"{flag(field.name)} has no effect with {flag(needed)} {actual}: it goes with {flag(needed)} {wanted}"


def _all_given(
    fields: Mapping[str, dataclasses.Field[Any]],
    flags: Mapping[str, Any],
    sets: Sequence[str],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    problems: list[str],
) -> list[tuple[str, str, Any]]:
    """(where from, key, value) of everything given, the weakest source first."""
    given = [(f"--config, {key}", key, value) for key, value in file.items() if value is not None]
    for name, field in fields.items():
        env = field.metadata["env"]
        if env and environ.get(env):
            given.append((f"environment variable {env}", name, environ[env]))
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals:
            problems.append(f"--set {item}: expected key=value")
            continue
        import yaml  # here, because most runs need none of it

        try:
            value = parse_yaml(text) if text else None
        except yaml.YAMLError as error:
            problems.append(f"--set {item}: {error}")
            continue
        *parents, last = key.split(".")
        nested: Any = {last: value} if parents else value
        for parent in reversed(parents[1:]):
            nested = {parent: nested}
        given.append((f"--set {key}", parents[0] if parents else key, nested))
    given += [
        (option_names(fields[name])[0] if name in fields else name, name, value)
        for name, value in flags.items()
        if value is not None and value != ()
    ]
    return given


def part_of(cls: type[T], config: object, **decided: Any) -> T:
    """A part of a command's options as an object of its own, so that none is copied by name.

    Args:
        cls: the part: a dataclass, whose fields are taken from ``config`` where it has fields of these names. None
            says nothing, and leaves a field's own default.
        config: all options of a command.
        decided: what is known better by now: a length for a default that was none, or what is no option at all.
    """
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    given = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    return cls(**{**given, **decided})


def bound_problems(options: object) -> list[str]:
    """Options of an object that was not made by ``resolve`` and that are outside their declared bounds."""
    problems = []
    for field in dataclasses.fields(options):  # type: ignore[arg-type]
        try:
            _check_bounds(getattr(options, field.name), field)
        except ValueError as error:
            problems.append(f"{option_names(field)[0]}: {error}")
    return problems


def _convert(raw: Any, hint: Any) -> Any:
    """Turn a YAML value or a string from the environment into the declared type.

    Raises:
        ValueError: with the value and what was expected.
    """
    unit: Unit | None = None
    plain = _plain(hint)
    origin = typing.get_origin(plain)
    if origin is Literal or plain is str:
        raw = _as_text(raw)
    for note in _notes(hint):
        if isinstance(note, Synonyms):
            raw = note.words.get(raw.lower(), raw)
            if (reason := note.refused.get(raw.lower())) is not None:
                raise ValueError(f"{raw}: {reason}")
        unit = note if isinstance(note, Unit) else unit
    hint = plain
    if origin is Literal:
        choices = typing.get_args(hint)
        if raw not in choices:
            raise ValueError(f"{raw!r} is none of {', '.join(choices)}{did_you_mean(raw.lower(), choices)}")
        return raw
    if origin is tuple:
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        return tuple(map(_as_text, items))
    if hint is bool:
        return _to_bool(raw)
    if hint in (int, float):
        return _to_number(raw, hint, unit)
    if origin is not None:
        return _to_mapping(raw)
    return raw


def _as_text(raw: Any) -> str:
    """A single value as the command line has it: YAML's true is the word."""
    if isinstance(raw, (Mapping, list, tuple)):
        raise ValueError(f"{raw!r} is not a single value")
    return str(raw).lower() if isinstance(raw, bool) else str(raw)


def _to_bool(raw: Any) -> bool:
    word = str(raw).lower()
    if isinstance(raw, float) or word not in TRUE_WORDS + FALSE_WORDS:
        raise ValueError(f"{raw!r} is neither true nor false")
    return word in TRUE_WORDS


def _to_mapping(raw: Any) -> dict[str, Any]:
    """A mapping of names to values; text is read as JSON, as other tools take it on the command line."""
    if isinstance(raw, str):
        try:
            raw = load_json(raw)
        except ValueError as error:
            raise ValueError(f"{raw!r} is no JSON object of names to values: {error}") from error
    if not isinstance(raw, Mapping):
        raise ValueError(f"{raw!r} is not a mapping of names to values")
    return dict(raw)


def _to_number(raw: Any, hint: type[int] | type[float], unit: Unit | None = None) -> int | float:
    expected = "an integer" if hint is int else "a number"
    try:
        number = float(raw) if not isinstance(raw, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or number != number or (hint is int and not number.is_integer()):
        if unit is not None and isinstance(raw, str):
            return unit.parse(raw)
        raise ValueError(f"{raw!r} is not {expected}")
    if hint is float:
        if math.isinf(number):
            raise ValueError(f"{raw!r} is not finite")
        return number
    return int(raw) if isinstance(raw, (int, str)) and not _has_fraction_form(raw) else int(number)


def _has_fraction_form(raw: int | str) -> bool:
    return isinstance(raw, str) and any(mark in raw for mark in ".eE")


def _check_bounds(value: Any, field: dataclasses.Field[Any]) -> None:
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if low is not None and value < low:
        raise ValueError(f"{value} is below {low}, the least allowed")
    if high is not None and value > high:
        raise ValueError(f"{value} is above {high}, the most allowed")
