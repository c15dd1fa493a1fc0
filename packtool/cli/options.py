"""Typer options made from the settings' declarations, so that each is written down once.

ms-swift's spelling of a command line, rewritten into typer's.

Accepted are both spellings of a name (``--max_length``), values behind booleans (``--packing true``), and several
values behind a list option (``--dataset a b c``).

What is said of names that a command does not know: another tool's, another command's, or mistyped.

How a command was called, besides its settings.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import shlex
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
import typer.core

from packtool.config.peers import find_peer, peer_names
from packtool.config.settings import (
    FALSE_WORDS,
    FIRST,
    LAST,
    PANELS,
    TRUE_WORDS,
    flag,
    option_names,
    parse_yaml,
    resolve,
    unit_of,
    value_type,
)
from packtool.errors import EXIT_INTERRUPTED, ConfigError, did_you_mean, most_similar
from packtool.visible import show

# A switch is off where it is not given, and has no name for no.
ArgumentKind = Literal["flag", "switch", "single", "list"]
_HELP = ("--help",)


def rewrite(
    arguments: Sequence[str],
    kinds: Mapping[str, ArgumentKind],
    nameless: str | None = None,
    stranger: Callable[[str, str | None], str | None] | None = None,
) -> list[str]:
    """The command line in the form that typer reads.

    Args:
        arguments: behind the command's name.
        kinds: of each option, by its name with dashes.
        nameless: the option that words without a name are values of.
        stranger: asked what to say of an option that is not known, and of its value; None leaves it out without a
            word. By default such options, and words of no option, pass through, for typer to refuse.

    Raises:
        ConfigError: naming unknown options, booleans that are neither true nor false, and words of no option.
    """
    result: list[str] = []
    problems: list[str] = []
    at = 0
    while at < len(arguments):
        argument = arguments[at]
        at += 1
        if not argument.startswith("--") or argument == "--":
            is_word = not argument.startswith("-")
            result += [nameless, argument] if nameless and is_word else [argument]
            if is_word and not nameless and stranger:
                problems.append(_stray(argument, arguments[at - 2] if at > 1 else "", kinds))
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        kind = kinds.get(name)
        if kind in ("flag", "switch"):
            if not equals and at < len(arguments) and arguments[at].lower() in TRUE_WORDS + FALSE_WORDS:
                value, equals = arguments[at], "="
                at += 1
            told = _flag(name, value, kind) if equals else [name]
            result += told or []
            problems += [f"{name}: {value!r} is neither true nor false"] if told is None else []
        elif kind == "list":
            words = _words(arguments, at)
            at += len(words)
            values = [value, *words] if equals else words
            # A name without a value stays, for typer to say so.
            result += [part for item in values for part in (name, item)] or [name]
        elif kind is None and stranger is not None and not _is_known(name, kinds):
            words = _words(arguments, at)
            at += len(words)
            values = [value, *words] if equals else words
            said = stranger(name, " ".join(values) if values else None)
            problems += [said] if said is not None else []
        else:
            result.append(f"{name}={value}" if equals else name)
            if kind == "single" and not equals and at < len(arguments):
                result.append(arguments[at])
                at += 1
    if problems:
        raise ConfigError.from_problems(problems)
    return result


def _words(arguments: Sequence[str], at: int) -> list[str]:
    """The words from there on to the next option."""
    end = at
    while end < len(arguments) and not arguments[end].startswith("--"):
        end += 1
    return list(arguments[at:end])


def _is_known(name: str, kinds: Mapping[str, ArgumentKind]) -> bool:
    return name in _HELP or kinds.get("--" + name.removeprefix("--no-")) == "flag"


def _stray(word: str, before: str, kinds: Mapping[str, ArgumentKind]) -> str:
    """What to say of a word that no option takes."""
    name = before.replace("_", "-")
    if kinds.get(name) in ("flag", "switch"):
        return f"{name}: {word!r} is neither true nor false"
    return f"{word!r} stands alone: every value has the name of its option in front, and values with spaces are quoted"


def _flag(name: str, value: str, kind: ArgumentKind) -> list[str] | None:
    """Words for typer.

    Returns:
        None for a value that is neither true nor false.
    """
    if value.lower() in TRUE_WORDS:
        return [name]
    if value.lower() in FALSE_WORDS:
        return ["--no-" + name.removeprefix("--")] if kind == "flag" else []
    return None


_NOTHING = ("", "none", "null", "[]", "{}", *FALSE_WORDS)
_LIKENESS = 0.75


class Strangers:
    """Answers for one command.

    Args:
        command: its name.
        settings: of all commands, by name.
        tell: takes remarks that are no mistakes.
    """

    def __init__(self, command: str, settings: Mapping[str, type], tell: Callable[[str], None]) -> None:
        self.command = command
        self._settings = settings
        self.tell = tell

    def on_command_line(self, name: str, value: str | None) -> str | None:
        """See ``cli.options.rewrite``.

        Args:
            name: ``--name``.
            value: what followed it.

        Returns:
            what is wrong; None if nothing is.
        """
        answer = self._answer(name.removeprefix("--"), name, value)
        return answer if answer is None or self._is_peers(name) else f"No such option: {answer}"

    def in_settings(self, name: str, value: Any) -> str | None:
        """See ``config.settings.resolve``; ``name`` is a key of YAML or of ``--set``."""
        answer = self._answer(name, repr(name), value)
        return answer if answer is None or self._is_peers(name) else f"unknown setting {answer}"

    def variables(self, environ: Mapping[str, str]) -> None:
        """Tell of environment variables that another tool would have read and packtool does not."""
        for entry in peer_names():
            if entry.is_variable and entry.status in ("renamed", "unsupported") and environ.get(entry.name):
                self.tell(entry.sentence(f"environment variable {entry.name}"))

    def _is_peers(self, name: str) -> bool:
        return find_peer(name.removeprefix("--"), self.command) is not None

    def _answer(self, name: str, shown: str, value: Any) -> str | None:
        peer = find_peer(name, self.command)
        if peer is None:
            return shown + self._guess(name)
        if peer.status == "unneeded":
            self.tell(peer.sentence(shown))
            return None
        if peer.status == "unsupported" and value is not None and str(value).strip().lower() in _NOTHING:
            return None
        return peer.sentence(shown, value)

    def _guess(self, name: str) -> str:
        """Another command's, the most similar one, or the most similar one of another command."""
        wanted = flag(name)
        others = {
            command: _names(settings)
            for command, settings in self._settings.items()
            if command not in (self.command, "sft")
        }
        if owned := _owned(wanted, others):
            return f"; it is {owned}"
        if guess := did_you_mean(wanted, _names(self._settings[self.command]), _LIKENESS):
            return guess
        elsewhere = most_similar(wanted, itertools.chain(*others.values()), _LIKENESS)
        return f"; did you mean {elsewhere}? It is {_owned(elsewhere, others)}" if elsewhere else ""


def _owned(name: str, options: Mapping[str, list[str]]) -> str:
    """Whose option it is, by commands and their options; nothing where it is nobody's."""
    owners = [command for command, names in options.items() if name in names]
    return f"an option of packtool {', '.join(owners)}" if owners else ""


def _names(settings: type) -> list[str]:
    fields = [field for field in dataclasses.fields(settings) if field.metadata["flag"]]
    return [name for field in fields for name in option_names(field)]


@dataclass(frozen=True)
class Invocation:
    """How a command was called.

    Args:
        arguments: everything behind ``packtool``, as it was given, so that torchrun can call it again in every process.
        as_json: one JSON document is wanted on stdout.
    """

    arguments: tuple[str, ...]
    as_json: bool

    @property
    def command(self) -> str:
        """The command line, to be shown and copied."""
        return shlex.join(["packtool", *self.arguments])


T = TypeVar("T")

COMMON_OPTIONS: dict[str, tuple[Any, Any]] = {
    "config": (
        Annotated[
            str | None,
            typer.Option("--config", metavar="FILE", help="YAML file of settings."),
        ],
        None,
    ),
    "set_": (
        Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="One setting; may be repeated."),
        ],
        None,
    ),
    "json_": (
        Annotated[
            bool,
            typer.Option("--json", help="One JSON document on stdout, all else on stderr."),
        ],
        False,
    ),
    "debug": (
        Annotated[
            bool,
            typer.Option(
                "--debug",
                help="Tracebacks, and what each batch holds while training (environment: PACKTOOL_LOG_LEVEL=DEBUG).",
            ),
        ],
        False,
    ),
}
_COMMON_KINDS: dict[str, ArgumentKind] = {
    "--config": "single",
    "--set": "list",
    "--json": "switch",
    "--debug": "switch",
}


def option_kinds(cls: type) -> dict[str, ArgumentKind]:
    """How each option of a command takes its value, by name."""
    kinds: dict[str, ArgumentKind] = dict(_COMMON_KINDS)
    for field in _flags(cls):
        kinds.update(dict.fromkeys(option_names(field), _kind(field, cls)))
    return kinds


class PanelCommand(typer.core.TyperCommand):
    """A command whose ``--help`` shows options under the headings that they were declared with.

    Attributes:
        nameless: what words without an option's name are, as the usage line shows it; None where there are none.
    """

    nameless: str | None = None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """See click; with the words that ``cli.options`` gives a name."""
        return [*super().collect_usage_pieces(ctx), *([self.nameless] if self.nameless else [])]

    def panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """(names and value, help) of every option, by heading, in the order of ``--help``."""
        found: dict[str, list[tuple[str, str]]] = {name: [] for name in PANELS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                found[getattr(parameter, "rich_help_panel", None) or LAST].append(record)
        return {name: records for name, records in found.items() if records}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """See click; without rich, which takes a tenth of a second to import."""
        for name, records in self.panels(ctx).items():
            with formatter.section(name):
                formatter.write_dl(records)


def command_of(
    cls: type[T], run: Callable[[T, Invocation], None], strangers: Callable[[], Strangers]
) -> Callable[..., None]:
    """A function that typer reads as a command with all of ``cls``'s options.

    Args:
        cls: the settings.
        run: called with the merged settings and how the command was called.
        strangers: what is said of names that are not known.
    """

    def command(ctx: typer.Context, **given: Any) -> None:
        common = {name: given.pop(name) for name in COMMON_OPTIONS}
        file = _read_yaml(common["config"]) if common["config"] else {}
        asked = strangers()
        sets = common["set_"] or ()
        sources: dict[str, Any] = {"sets": sets, "environ": os.environ, "file": file}
        config = resolve(cls, given, **sources, describe_unknown=asked.in_settings, warn=asked.tell)
        asked.variables(os.environ)
        try:
            run(config, Invocation(ctx.obj, common["json_"]))
        except KeyboardInterrupt:
            # Typer would end without a word. Commands that leave something to go on from have said so themselves.
            show("packtool: interrupted", error=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None

    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in _flags(cls):
        annotation, default = _option(field, cls)
        parameters.append(_parameter(field.name, annotation, default))
    parameters += [_parameter(name, annotation, default) for name, (annotation, default) in COMMON_OPTIONS.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flags(cls: type) -> list[dataclasses.Field[Any]]:
    """Settings as --help shows them: those that a command names as needed first, in its order; else required ones."""
    fields = [field for field in dataclasses.fields(cls) if field.metadata["flag"]]
    order = _needed_first(cls) or tuple(field.name for field in fields if _required(field))
    return sorted(fields, key=lambda field: order.index(field.name) if field.name in order else len(order))


def _needed_first(cls: type) -> tuple[str, ...]:
    return getattr(cls, "NEEDED_FIRST", ())


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _kind(field: dataclasses.Field[Any], cls: type) -> ArgumentKind:
    hint = value_type(field, cls)
    if hint is bool:
        return "flag"
    return "list" if typing.get_origin(hint) is tuple else "single"


def _option(field: dataclasses.Field[Any], cls: type) -> tuple[Any, Any]:
    """Values stay text: ``config.resolve`` converts them, so that all mistakes are told at once."""
    kind = _kind(field, cls)
    names = list(option_names(field))
    settings: dict[str, Any] = {
        "help": _help(field),
        "show_default": False,
        "rich_help_panel": FIRST if field.name in _needed_first(cls) else field.metadata["panel"],
    }
    if kind == "flag":
        names = [f"{name}/--no-{name.removeprefix('--')}" for name in names]
        return Annotated[bool | None, typer.Option(*names, **settings)], None
    unit = unit_of(field, cls)
    settings["metavar"] = _metavar(value_type(field, cls)) if unit is None else unit
    if kind == "list":
        return Annotated[list[str] | None, typer.Option(*names, **settings)], None
    return Annotated[str | None, typer.Option(*names, **settings)], None


def _help(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["help"]
    if field.metadata["env"]:
        text += f" (environment: {field.metadata['env']})"
    default = field.default
    if _required(field):
        return f"{text} (required)"
    if default in (None, dataclasses.MISSING, (), "") or "; by default" in text:
        return text
    shown = " ".join(default) if isinstance(default, tuple) else str(default)
    return f"{text} (default: {shown.lower() if isinstance(default, bool) else shown})"


def _metavar(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "|".join(typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "TEXT..."
    if typing.get_origin(hint) is not None:
        return "JSON"
    return {int: "N", float: "X"}.get(hint, "TEXT")


def _read_yaml(path: str) -> Mapping[str, Any]:
    import yaml  # here, because most runs need none of it

    try:
        value = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path}: expected names and values, found a {type(value).__name__}")
    return {str(key): item for key, item in value.items()}
