"""Commands of the command line: typer options made from settings classes, and rewriting of their arguments.

Accepted beyond what typer reads, as in ms-swift: underscores in names (``--max_length``), values after booleans
(``--packing true``), and several values after a list option (``--dataset a b c``).
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import shlex
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
import typer.core

from packtool.config.compat_names import compat_names, find_compat_name
from packtool.config.data import ExportConfig
from packtool.config.plan import PlanConfig
from packtool.config.settings import (
    COMMON,
    FALSE_WORDS,
    LAST,
    PANELS,
    TRUE_WORDS,
    flag,
    is_required,
    option_names,
    resolve,
    unit_of,
    value_type,
)
from packtool.config.train import TrainConfig
from packtool.errors import EXIT_INTERRUPTED, ConfigError, did_you_mean, most_similar
from packtool.terminal import show, show_json
from packtool.translate.read import load_config_file, read_file
from packtool.translate.render import report
from packtool.translate.tools import translate

if TYPE_CHECKING:
    from packtool.report.tables import TerminalProgress


@dataclass(frozen=True)
class Invocation:
    """One call of a command.

    ``arguments`` are everything after ``packtool``, unchanged: torchrun starts every process with them.
    """

    arguments: tuple[str, ...]
    as_json: bool

    @property
    def command(self) -> str:
        """The command line, quoted for a shell."""
        return shlex.join(["packtool", *self.arguments])

    def show(self, figures: object, lines: Iterable[str]) -> None:
        """Print ``figures`` as JSON with ``--json``, else ``lines``."""
        if self.as_json:
            show_json(figures)
        else:
            show("\n".join(lines))


def terminal_progress(*, enabled: bool = True) -> TerminalProgress:
    """Return a progress on stderr that prints nothing unless ``enabled``; its module is imported when it is needed."""
    from packtool.report.tables import TerminalProgress

    return TerminalProgress(enabled=enabled)


@contextmanager
def interruptible_progress() -> Iterator[TerminalProgress]:
    """Yield a progress on stderr; Ctrl-C prints how to start again, and exits with code 130."""
    with terminal_progress() as progress:
        try:
            yield progress
        except KeyboardInterrupt:
            progress.note("interrupted; repeat the command to start again")
            raise typer.Exit(EXIT_INTERRUPTED) from None


# flag: --x and --no-x; switch: --x only, off by default; valued flag: a flag that also accepts other values than
# booleans; single: one value; list: several values.
ArgumentKind = Literal["flag", "switch", "valued flag", "single", "list"]
ExplainUnknown = Callable[[str, str | None], str | None]
T = TypeVar("T")


def rewrite_arguments(
    arguments: Sequence[str], kinds: Mapping[str, ArgumentKind], positional: str | None, explain_unknown: ExplainUnknown
) -> list[str]:
    """Rewrite a command line into the form that typer reads; a ConfigError lists all problems.

    Typer reads one value per list option and none for a flag: ``--list a b --flag true`` becomes
    ``--list a --list b --flag``.

    Args:
        kinds: of each option, by its name with dashes.
        positional: the option that gets values without an option's name; None if there is none.
        explain_unknown: returns the error message for an unknown option and its value, or None to ignore them.
    """
    rewritten: list[str] = []
    problems: list[str] = []
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        following = arguments[index + 1 :]
        num_values = 0  # of the following arguments that belong to this one
        if argument.startswith("--") and argument != "--":
            num_values = _num_values(argument, following, kinds)
            try:
                rewritten += _rewrite_option(argument, following[:num_values], kinds, explain_unknown)
            except ValueError as error:
                problems.append(str(error))
        elif argument.startswith("-"):  # a short option, a negative number, or --
            rewritten.append(argument)
        elif positional is not None:
            rewritten += [positional, argument]
        else:
            problems.append(_stray_value_message(arguments, index, kinds))
        index += 1 + num_values
    if problems:
        raise ConfigError.from_problems(problems)
    return rewritten


def _rewrite_option(
    argument: str, values: Sequence[str], kinds: Mapping[str, ArgumentKind], explain_unknown: ExplainUnknown
) -> list[str]:
    """Return the words for typer that give an option the values after it; the ValueError is the error message."""
    name, joined_values = _split_option(argument)
    kind = _kind_of_argument(name, kinds)
    values = [*joined_values, *values]
    if kind != "unknown":
        return _option_words(name, kind, values, is_joined=bool(joined_values))
    problem = explain_unknown(name, " ".join(values) if values else None)
    if problem is not None:
        raise ValueError(problem)
    return []


def _split_option(argument: str) -> tuple[str, list[str]]:
    """Return an option's name with dashes, and the value of ``--name=value``, or [] for ``--name``."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-"), [value] if equals else []


def _kind_of_argument(name: str, kinds: Mapping[str, ArgumentKind]) -> str:
    """Return the kind of an option: ``negation`` is ``--no-x`` of a valued flag, ``verbatim`` is for typer as it is."""
    if name in kinds:
        return kinds[name]
    positive_kind = kinds.get("--" + name.removeprefix("--no-"))
    if positive_kind == "valued flag":
        return "negation"
    return "verbatim" if name == "--help" or positive_kind == "flag" else "unknown"


def _num_values(argument: str, following: Sequence[str], kinds: Mapping[str, ArgumentKind]) -> int:
    """Return how many of the following arguments are values of an option."""
    name, joined_values = _split_option(argument)
    kind = _kind_of_argument(name, kinds)
    if kind in ("list", "unknown"):
        return sum(1 for _ in itertools.takewhile(lambda word: not word.startswith("--"), following))
    if joined_values or not following:
        return 0
    is_value_of_flag = kind in ("flag", "switch", "valued flag") and _is_flag_value(following[0], kind)
    return 1 if kind == "single" or is_value_of_flag else 0


def _option_words(name: str, kind: str, values: Sequence[str], *, is_joined: bool) -> list[str]:
    """Return the words for typer that give an option its values; ValueError if a flag gets no boolean."""
    if kind in ("flag", "switch", "valued flag"):
        return _flag_words(name, kind, values[0] if values else "true")
    if kind == "negation":
        return [f"--{name.removeprefix('--no-')}=false"]
    if kind == "list":
        # Typer reads one value per name. A name without a value stays for typer to report.
        return [word for value in values for word in (name, value)] or [name]
    return [f"{name}={values[0]}"] if is_joined else [name, *values]


def _flag_words(name: str, kind: str, value: str) -> list[str]:
    """Return the words for typer that set a flag to a value; ValueError if the value is no boolean."""
    if kind == "valued flag":
        return [f"{name}={value}"]
    if value.lower() in TRUE_WORDS:
        return [name]
    if value.lower() not in FALSE_WORDS:
        raise ValueError(f"{name}: {value!r} is neither true nor false")
    return ["--no-" + name.removeprefix("--")] if kind == "flag" else []


def _is_flag_value(argument: str, kind: str) -> bool:
    """Return whether the argument after a flag is its value, and not a value without an option's name."""
    word = argument.lower()
    return word in TRUE_WORDS + FALSE_WORDS or (kind == "valued flag" and (word == "auto" or word.isdecimal()))


def _stray_value_message(arguments: Sequence[str], index: int, kinds: Mapping[str, ArgumentKind]) -> str:
    """Return the error message for a value that no option takes."""
    value = arguments[index]
    previous = arguments[index - 1].replace("_", "-") if index > 0 else ""
    if kinds.get(previous) in ("flag", "switch"):
        return f"{previous}: {value!r} is neither true nor false"
    if kinds.get(previous) == "valued flag":
        return f"{previous}: {value!r} is none of true, false, auto, and a number of layers"
    return f"unexpected value {value!r}: put the name of its option in front, and quote values with spaces"


_DISABLED = ("", "none", "null", "[]", "{}", *FALSE_WORDS)
_MIN_SIMILARITY = 0.75


class UnknownOptions:
    """Error messages for option names that a command does not have: those of another tool or command, or misspelled."""

    def __init__(self, command: str, settings: Mapping[str, type], warn: Callable[[str], None]) -> None:
        self.command = command
        self._settings = settings
        self.warn = warn

    def on_command_line(self, name: str, value: str | None) -> str | None:
        """Return the error message for an unknown ``--name`` and its value; None if they can be ignored."""
        return self._message(name.removeprefix("--"), value, "No such option:", name)

    def in_settings(self, name: str, value: Any) -> str | None:
        """Return the error message for an unknown key of YAML or ``--set``; None if it can be ignored."""
        return self._message(name, value, "unknown setting", repr(name))

    def warn_of_variables(self, environ: Mapping[str, str]) -> None:
        """Warn about set environment variables of other tools that packtool does not read."""
        for entry in compat_names():
            if entry.is_variable and entry.status in ("renamed", "unsupported") and environ.get(entry.name):
                self.warn(entry.sentence(f"environment variable {entry.name}"))

    def _message(self, name: str, value: Any, error: str, shown: str) -> str | None:
        """Explain another tool's name, or return ``error`` with ``shown``, the name as given, and a suggestion."""
        compat_name = find_compat_name(name, self.command)
        if compat_name is None:
            return f"{error} {shown}{self._suggestion(flag(name))}"
        if compat_name.status == "unneeded":
            self.warn(compat_name.sentence(shown))
            return None
        is_switch = compat_name.status == "unsupported" or compat_name.selects_a_value
        if is_switch and value is not None and str(value).strip().lower() in _DISABLED:
            return None
        return compat_name.sentence(shown, value)

    def _suggestion(self, name: str) -> str:
        """Return the end of an error message: which command has this option, or the most similar option."""
        options = {
            command: [name for field in _flags(settings) for name in option_names(field)]
            for command, settings in self._settings.items()
        }
        others = {command: names for command, names in options.items() if command not in (self.command, "sft")}

        def owners(name: str) -> str:
            return ", ".join(command for command, names in others.items() if name in names)

        if owners(name):
            return f"; it is an option of packtool {owners(name)}"
        if suggestion := did_you_mean(name, options[self.command], _MIN_SIMILARITY):
            return suggestion
        similar = most_similar(name, itertools.chain(*others.values()), _MIN_SIMILARITY)
        return f"; did you mean {similar}? It is an option of packtool {owners(similar)}" if similar else ""


_DEBUG_HELP = "Show tracebacks and the contents of batches (environment: PACKTOOL_LOG_LEVEL=DEBUG)."
_FROM_HELP = "Read --config as a file of ms-swift, llama-factory, axolotl or trl; default detects it."
_TRANSLATED = (TrainConfig, ExportConfig, PlanConfig)
# Options of every command by name: kind, type, and arguments of typer.Option.
_COMMON_OPTIONS: dict[str, tuple[ArgumentKind, Any, dict[str, Any]]] = {
    "config": ("single", str | None, {"metavar": "FILE", "help": "Read options from this YAML or JSON file."}),
    "from": ("single", str | None, {"metavar": "TOOL", "help": _FROM_HELP}),
    "set": ("list", list[str] | None, {"metavar": "KEY=VALUE", "help": "Set an option by its YAML name; repeatable."}),
    "json": ("switch", bool, {"help": "Print one JSON document on stdout; messages go to stderr."}),
    "debug": ("switch", bool, {"help": _DEBUG_HELP}),
}


def _common_options(cls: type) -> dict[str, tuple[ArgumentKind, Any, dict[str, Any]]]:
    """Return ``_COMMON_OPTIONS`` of a command; only those that read other tools' files have ``--from``."""
    return {name: each for name, each in _COMMON_OPTIONS.items() if name != "from" or cls in _TRANSLATED}


def option_kinds(cls: type) -> dict[str, ArgumentKind]:
    """Return the kind of each option of a command by all its names."""
    kinds = {f"--{name}": kind for name, (kind, _, _) in _common_options(cls).items()}
    return kinds | {name: _kind(field, cls) for field in _flags(cls) for name in option_names(field)}


class PanelCommand(typer.core.TyperCommand):
    """A command whose ``--help`` groups options by heading; ``positional`` is shown in its usage line."""

    positional: str | None = None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Add ``positional`` to click's usage line."""
        return [*super().collect_usage_pieces(ctx), *([self.positional] if self.positional else [])]

    def panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Return (names and value, help) of every option by heading, in the order of ``--help``."""
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in PANELS}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels[getattr(parameter, "rich_help_panel", None) or LAST].append(record)
        return {name: records for name, records in panels.items() if records}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by heading, without rich, whose import takes 0.1 s."""
        for name, records in self.panels(ctx).items():
            with formatter.section(name):
                formatter.write_dl(records)


def command_of(
    cls: type[T], run: Callable[[T, Invocation], None], unknown_options: UnknownOptions
) -> Callable[..., None]:
    """Return a typer command with all options of ``cls``; it calls ``run`` with the merged settings."""

    def command(ctx: typer.Context, **values: Any) -> None:
        common_values = {name: values.pop(f"{name}_") for name in _common_options(cls)}  # as ``_parameters`` names them
        config = _merge_settings(cls, values, common_values, unknown_options)
        unknown_options.warn_of_variables(os.environ)
        try:
            run(config, Invocation(arguments=ctx.obj, as_json=common_values["json"]))
        except KeyboardInterrupt:
            # Typer would exit without a message. Commands that can be resumed handle the interrupt themselves.
            show("packtool: interrupted", error=True)
            raise typer.Exit(EXIT_INTERRUPTED) from None

    # Typer makes an option of each parameter in a function's signature.
    parameters = _parameters(cls)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _merge_settings(
    cls: type[T], flags: Mapping[str, Any], common_values: Mapping[str, Any], unknown_options: UnknownOptions
) -> T:
    """Merge the settings of all sources: flags, ``--config``, ``--set`` and the environment."""
    path, tool = common_values["config"], common_values.get("from")
    file_values, problems = _read_config(cls, path, tool, unknown_options)
    return resolve(
        cls,
        flags,
        sets=common_values["set"] or (),
        environ=os.environ,
        file=file_values,
        describe_unknown=unknown_options.in_settings,
        warn=unknown_options.warn,
        source_problems=problems,
    )


def _parameters(cls: type) -> list[inspect.Parameter]:
    """Return the parameters of a command: typer's context, fields of its settings, and common options (``NAME_``)."""
    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += [_option(field, cls) for field in _flags(cls)]
    for name, (_, value_class, typer_options) in _common_options(cls).items():
        default = False if value_class is bool else None
        parameters.append(_parameter(f"{name}_", value_class, typer.Option(f"--{name}", **typer_options), default))
    return parameters


def _parameter(name: str, hint: Any, option: Any, default: object = None) -> inspect.Parameter:
    annotation = Annotated[hint, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flags(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields with a flag in the order of ``--help``: first ``COMMON_OPTIONS``, or else the required ones."""
    fields = [field for field in dataclasses.fields(cls) if field.metadata["panel"]]
    order = getattr(cls, "COMMON_OPTIONS", ()) or tuple(field.name for field in fields if is_required(field))
    return sorted(fields, key=lambda field: order.index(field.name) if field.name in order else len(order))


def _kind(field: dataclasses.Field[Any], cls: type) -> ArgumentKind:
    hint = value_type(field, cls)
    if hint is bool:
        return "flag" if unit_of(field, cls) is None else "valued flag"
    return "list" if typing.get_origin(hint) is tuple else "single"


def _option(field: dataclasses.Field[Any], cls: type) -> inspect.Parameter:
    """Return the typer option of a setting; its value stays text, because ``resolve`` reports all errors at once."""
    kind = _kind(field, cls)
    names = list(option_names(field))
    panel = COMMON if field.name in getattr(cls, "COMMON_OPTIONS", ()) else field.metadata["panel"]
    typer_options: dict[str, Any] = {"help": _help(field), "show_default": False, "rich_help_panel": panel}
    if kind == "flag":
        names = [f"{name}/--no-{name.removeprefix('--')}" for name in names]
        return _parameter(field.name, bool | None, typer.Option(*names, **typer_options))
    typer_options["metavar"] = _metavar(field, cls)
    value_class: Any = list[str] | None if kind == "list" else str | None
    return _parameter(field.name, value_class, typer.Option(*names, **typer_options))


def _help(field: dataclasses.Field[Any]) -> str:
    """Return a setting's help with its environment variable, and its default if the help does not state it."""
    text = str(field.metadata["help"])
    if field.metadata["env"]:
        text += f" (environment: {field.metadata['env']})"
    default = field.default
    if is_required(field):
        return f"{text} (required)"
    if default in (None, dataclasses.MISSING, (), "") or "; default " in text:
        return text
    shown = " ".join(default) if isinstance(default, tuple) else str(default)
    return f"{text} (default: {shown.lower() if isinstance(default, bool) else shown})"


def _metavar(field: dataclasses.Field[Any], cls: type) -> str:
    """Return what ``--help`` shows for the value of a setting, such as ``N``, ``PATH`` or ``a|b``."""
    hint = value_type(field, cls)
    if typing.get_origin(hint) is Literal:
        return "|".join(typing.get_args(hint))
    is_list = typing.get_origin(hint) is tuple
    if typing.get_origin(hint) is not None and not is_list:
        return "JSON"
    text = "PATH" if field.metadata["path"] else "TEXT"
    return f"{text}..." if is_list else unit_of(field, cls) or {int: "N", float: "X"}.get(hint, text)


def _read_config(
    cls: type, path: str | None, tool: str | None, unknown_options: UnknownOptions
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of ``--config``, and the problems of their translation if they are those of another tool."""
    if path is None:
        if tool is not None:
            raise ConfigError(f"--from {tool}: give it with --config, which names the file")
        return {}, []
    if cls not in _TRANSLATED:
        return load_config_file(path), []
    source = read_file(path, tool, f"--config {path}")
    if not source.tool:
        return source.values, []
    names = [field.name for field in dataclasses.fields(cls)]
    translation = translate(source, names, unknown_options.command, os.environ)
    unknown_options.warn(report(translation))
    return translation.values, translation.problems
