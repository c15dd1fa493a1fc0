"""Typer options made from the settings' declarations, so that each is written down once."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
import typer.core

from packtool.cli.arguments import ArgumentKind
from packtool.cli.invocation import Invocation
from packtool.cli.strangers import Strangers
from packtool.config.panels import FIRST, LAST, PANELS
from packtool.config.settings import option_names, resolve, unit_of, value_type
from packtool.config.yaml_values import parse_yaml
from packtool.errors import EXIT_INTERRUPTED, ConfigError
from packtool.visible import show

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
        """See click; with the words that ``cli.arguments`` gives a name."""
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
        config = resolve(cls, given, **sources, stranger=asked.in_settings, tell=asked.tell)
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
    settings["metavar"] = _metavar(value_type(field, cls)) if unit is None else unit.letter
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
