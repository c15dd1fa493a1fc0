"""The command ``packtool``: its subcommands, exit codes of errors, and ``--debug``."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from packtool import errors
from packtool.cli.export import run_check, run_export, run_import
from packtool.cli.inspect import run_explain, run_inspect, run_schema
from packtool.cli.options import Invocation, PanelCommand, UnknownOptions, command_of, option_kinds, rewrite_arguments
from packtool.cli.plan import run_pack, run_plan, run_simulate
from packtool.cli.train import run_demo_command, run_eval, run_merge, run_train, run_verify
from packtool.cli.translate import run_translate
from packtool.config import commands
from packtool.config.codes import INTERNAL_ERROR
from packtool.config.data import ExportConfig, ImportConfig
from packtool.config.plan import PackConfig, PlanConfig
from packtool.config.settings import FALSE_WORDS
from packtool.config.simulate import SimulateConfig
from packtool.config.train import TrainConfig
from packtool.constants import VERSION
from packtool.errors import ConfigError
from packtool.launch.processes import end_with_launcher, is_printed_elsewhere
from packtool.launch.world import LOST_PEER, is_launched, is_lost_peer, leave_process_group
from packtool.terminal import show

_VARIABLE = "PACKTOOL_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO")


def is_debug_requested(arguments: Sequence[str]) -> bool:
    """Return whether the command line or the environment enables debug output."""
    level = os.environ.get(_VARIABLE) or os.environ.get("SWIFT_LOG_LEVEL", "")
    if level.upper() == "DEBUG":
        return True
    for at, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == "--debug":
            return (value or " ".join(arguments[at + 1 : at + 2])).lower() not in FALSE_WORDS
    return False


def configure_logging(debug: bool) -> None:
    """Print debug messages of packtool's loggers on stderr if ``debug``, else only pass warnings to root handlers."""
    level = os.environ.get(_VARIABLE, "")
    if level and level.upper() not in _LEVELS:
        raise ConfigError(f"{_VARIABLE}={level}: give {' or '.join(_LEVELS)}")
    logger = logging.getLogger("packtool")
    logger.handlers.clear()
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    logger.propagate = not debug  # else a root handler would show each message again
    if debug:
        logger.addHandler(_StderrHandler())


class _StderrHandler(logging.Handler):
    """Prints records on stderr with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        show(f"packtool: {record.getMessage()}", error=True)


def _documentation(page: str) -> str:
    """Return the line of ``--help`` with the path of a documentation page; empty if it is not installed."""
    root = Path(__file__).parents[2]
    # Beside the package after pip install --target, below the home directory after --user.
    bases = (sysconfig.get_path("data"), root, site.getuserbase())
    installed = [Path(base, "share", "doc", "packtool") for base in bases]
    folders = [root / "docs"] if (root / "pyproject.toml").is_file() else installed
    return next((f"Documentation: {folder / page}" for folder in folders if (folder / page).is_file()), "")


app = typer.Typer(
    name="packtool",
    help="Turn multimodal conversations into packed training steps.",
    epilog=_documentation("index.md"),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

# Each command's settings, function and first line of --help.
_COMMANDS: dict[str, tuple[type, Callable[[Any, Invocation], None], str]] = {
    "export": (ExportConfig, run_export, "Tokenize rows into a cache."),
    "import": (ImportConfig, run_import, "Make a cache from data that another tool has tokenized."),
    "check": (commands.CheckConfig, run_check, "Check rows in CI, without writing a cache."),
    "train": (TrainConfig, run_train, "Train on packed samples; set NPROC_PER_NODE=8 to use 8 GPUs."),
    "sft": (TrainConfig, run_train, "Alias of train."),
    "eval": (commands.EvalConfig, run_eval, "Compute loss, perplexity and accuracy of every sample."),
    "merge": (commands.MergeConfig, run_merge, "Merge an adapter into its base model."),
    "demo": (commands.DemoConfig, run_demo_command, "Run export and training on a small synthetic dataset."),
    "explain": (commands.ExplainConfig, run_explain, "Explain the code of a message or of a dropped row."),
    "inspect": (commands.InspectConfig, run_inspect, "Show a cache, its samples, or what a run has trained."),
    "plan": (PlanConfig, run_plan, "Preview the training schedule; needs no GPU."),
    "pack": (PackConfig, run_pack, "Write packs to files for other trainers."),
    "schema": (commands.SchemaConfig, run_schema, "Print a JSON Schema, with which editors check YAML files."),
    "simulate": (SimulateConfig, run_simulate, "Simulate step times of training strategies on a GPU cluster."),
    "translate": (commands.TranslateConfig, run_translate, "Translate configurations of other tools into packtool's."),
    "verify": (commands.VerifyConfig, run_verify, "Check that packing does not change a model's outputs."),
}
_SETTINGS = {name: settings for name, (settings, _, _) in _COMMANDS.items()}
# Option of a command's positional values, and how the usage line shows them.
_POSITIONAL = {
    "import": ("--dataset", "PREPARED..."),
    "check": ("--dataset", "ROWS..."),
    "explain": ("--code", "[CODE]"),
    "inspect": ("--directory", "CACHE|OUTPUT_DIR"),
    "pack": ("--cached-dataset", "CACHE..."),
    "plan": ("--cached-dataset", "[CACHE]..."),
    "schema": ("--kind", "[train|export|mixture]"),
    "simulate": ("--cached-dataset", "[CACHE]..."),
    "merge": ("--adapter", "ADAPTER"),
    "translate": ("--file", "[FILE] [-- COMMAND...]"),
}


def _warn(message: str) -> None:
    """Print a warning, except in processes of torchrun, whose launcher has printed it."""
    if not is_launched():
        _print(message)


_OPTIONS_PAGE = _documentation("options.md")
for _name, (_settings, _run, _help) in _COMMANDS.items():
    _class = type("PanelCommand", (PanelCommand,), {"positional": _POSITIONAL.get(_name, (None, None))[1]})
    _command = command_of(_settings, _run, UnknownOptions(_name, _SETTINGS, _warn))
    app.command(cls=_class, name=_name, help=_help, epilog=_OPTIONS_PAGE)(_command)


def _version(is_requested: bool) -> None:
    if is_requested:
        show(f"packtool {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its code; a process of torchrun exits when torchrun does."""
    end_with_launcher()
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    if code == errors.EXIT_INTERRUPTED:
        _exit_without_teardown(code)
    # All ranks end by agreement; after an error, others may be gone.
    if code == errors.EXIT_OK or code > errors.EXIT_INTERRUPTED:
        leave_process_group()
    sys.exit(code)


def _exit_without_teardown(code: int) -> None:
    """Exit without Python's own teardown, which can crash after an interrupt; functions of ``atexit`` still run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader is gone
                stream.flush()
    finally:
        os._exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code (see ``packtool.errors``)."""
    original = tuple(arguments)
    debug = is_debug_requested(original)
    try:
        has_command = bool(arguments) and arguments[0] in _COMMANDS
        if has_command:
            configure_logging(debug)
            arguments = _with_typer_options(arguments)
        # Typer prints --help and errors of usage itself, and raises SystemExit. Commands get ``obj`` as ``ctx.obj``.
        app(args=arguments, standalone_mode=True, prog_name="packtool", obj=original)
    except SystemExit as end:
        code = errors.EXIT_OK if end.code is None else end.code
        return code if isinstance(code, int) else errors.EXIT_USAGE
    except KeyboardInterrupt:
        _print("interrupted")
        return errors.EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            show(traceback.format_exc(), error=True)
        return _report_error(error)
    return errors.EXIT_OK


def _with_typer_options(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a command as typer reads it, with positional values and other spellings as options."""
    command, *words = arguments
    positional_option, _ = _POSITIONAL.get(command, (None, None))
    unknown = UnknownOptions(command, _SETTINGS, _warn)
    kinds = option_kinds(_SETTINGS[command])
    if command == "translate" and "--" in words:  # the words after -- are another tool's command line
        separator = words.index("--")
        words[separator:] = [f"--command-line={word}" for word in words[separator + 1 :]]
    return [command, *rewrite_arguments(words, kinds, positional_option, unknown.on_command_line)]


def _report_error(error: Exception) -> int:
    """Print the message of an error that ended a command, and return the exit code."""
    if isinstance(error, errors.StoppedError):  # only the first process has a message
        if error.message:
            _print(error.with_code())
        return error.exit_code
    if isinstance(error, errors.PacktoolError):
        _print(f"error: {error.with_code()}")
        return error.exit_code
    if is_lost_peer(error):
        _print(LOST_PEER)
    else:
        description = f"{type(error).__name__}: {error} [{INTERNAL_ERROR}]"
        _print(f"unexpected error: {description}\nThis is a bug; --debug shows the traceback.")
    return errors.EXIT_UNEXPECTED


def _print(message: str) -> None:
    """Print a message on stderr, unless another process of the run prints it."""
    if not is_printed_elsewhere(message):
        show(f"packtool: {message}", error=True)
