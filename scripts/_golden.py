"""Golden record: everything packtool outputs for some hundred commands, to show that a refactoring changes nothing.

``write`` runs the commands on small models and rows made on the spot and writes a record; ``compare`` runs them again
with the present code and prints every difference. Commands are forks of this process, which has imported what they
need, and two run at a time. Only torchrun starts processes of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import os
import pkgutil
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

import typer.main
from _golden_commands import COMMANDS, Command, commands, helps, wrong_lines
from _golden_record import compare_records, describe_files, format_sections, normalize_text

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = Path(tempfile.gettempdir()).resolve() / "packtool-golden"
"""Where commands run: always the same directory, for caches hold paths."""

MODIFIED_S = 1_700_000_000
"""Time of modification of rows and packs."""

NUM_WORKERS = 2
MAX_SECONDS = 240
"""A command that takes longer is ended."""

_LIBRARIES = (
    "torch",
    "transformers",
    "transformers.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen2_5_omni.modeling_qwen2_5_omni",
    "accelerate",
    "peft",
    "datasets",
    "pyarrow.parquet",
    "av",
)
_PLACES = {str(ROOT): "<golden>", str(REPOSITORY): "<packtool>"}


def main() -> int:
    """Run a command line; the exit code is 1 if records differ."""
    parser = argparse.ArgumentParser(prog="scripts/golden", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help=argparse.SUPPRESS)
    actions = parser.add_subparsers(dest="action", required=True)
    write = actions.add_parser("write", help="Write a record.")
    write.add_argument("record", type=Path)
    compare = actions.add_parser("compare", help="Compare a record with the present code, or with another record.")
    compare.add_argument("record", type=Path)
    compare.add_argument("other", type=Path, nargs="?")
    arguments = parser.parse_args()
    record: Path = arguments.directory / arguments.record
    if arguments.action == "write":
        write_record(record)
        return 0
    if not record.is_dir():
        parser.error(f"{record} is no record")
    if arguments.other is None:
        other = record.with_name(f"{record.name}-new")
        write_record(other)
    else:
        other = arguments.directory / arguments.other
    differences = compare_records(record, other)
    for difference in differences:
        print(difference)
    print(f"{len(differences)} differences between {record} and {other}")
    return 1 if differences else 0


def write_record(directory: Path) -> None:
    """Run every command and write what came of it."""
    begin = time.monotonic()
    with _only_one():
        shutil.rmtree(ROOT, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
        (ROOT / "home").mkdir(parents=True)
        _set_environment()
        os.chdir(ROOT)
        ended = _fork(_make_world, ROOT / "world.log")
        if os.waitstatus_to_exitcode(os.waitpid(ended, 0)[1]):
            sys.exit((ROOT / "world.log").read_text())
        directory.mkdir(parents=True)
        # Before anything large is imported: forks of a small process take a tenth of the time.
        runpy.run_module("packtool", run_name="packtool-imported")
        typer.main.get_command = lru_cache(typer.main.get_command)  # else every call makes all commands anew
        _run_all(helps(), directory)
        jobs = {}
        for command in COMMANDS:
            help_text = (ROOT / "outputs" / "help" / command / "stdout").read_text()
            for group, lines in wrong_lines(command, help_text).items():
                jobs[f"wrong/{command}-{group}"] = partial(_run_lines, f"wrong/{command}-{group}", lines, directory)
        _run_pool(jobs)
        _import_everything()
        _run_all(commands(), directory)
        shutil.rmtree(ROOT)
    num_files = sum(1 for _ in directory.rglob("*.txt"))
    print(f"{directory}: {num_files} files, {time.monotonic() - begin:.0f} s", file=sys.stderr)


def _make_world() -> None:
    from _golden_world import make_world  # which imports much

    make_world(ROOT)
    for path in ROOT.rglob("*"):
        os.utime(path, (MODIFIED_S, MODIFIED_S))


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Wait for others that use the directory."""
    with ROOT.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another run in {ROOT}", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _set_environment() -> None:
    """Make an environment without anything of whoever runs this, but PATH."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    os.environ.clear()
    os.environ.update(kept)
    os.environ.update(
        HOME=str(ROOT / "home"),
        COLUMNS="120",
        LINES="40",
        LC_ALL="C.UTF-8",
        TZ="UTC",
        TERM="dumb",
        NO_COLOR="1",
        OMP_NUM_THREADS="1",
        OMP_WAIT_POLICY="PASSIVE",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONHASHSEED="0",  # also of this process, by scripts/golden
        CUDA_VISIBLE_DEVICES="",
        MPLBACKEND="Agg",
        SOURCE_DATE_EPOCH="1700000000",
    )


def _import_everything() -> None:
    """Import what commands import, once for all of them."""
    import torch

    torch.set_num_threads(1)
    for name in _LIBRARIES:
        importlib.import_module(name)
    package = importlib.import_module("packtool")
    for module in pkgutil.walk_packages(package.__path__, "packtool.", onerror=lambda _: None):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(Exception):  # of an optional package that is not there
                importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def _run_all(todo: Sequence[Command], directory: Path) -> None:
    jobs = {command.name: partial(_run_command, command, directory) for command in todo}
    _run_pool(jobs, {command.name: command.needs for command in todo})


def _run_pool(jobs: Mapping[str, Callable[[], None]], needs: Mapping[str, Sequence[str]] | None = None) -> None:
    """Run jobs in forks, ``NUM_WORKERS`` at a time, each when those it needs have ended."""
    waiting, running, ended = dict(jobs), {}, set()
    while waiting or running:
        ready = [name for name in waiting if ended.issuperset((needs or {}).get(name, ()))]
        while ready and len(running) < NUM_WORKERS:
            name = ready.pop(0)
            running[_fork(waiting.pop(name), ROOT / "outputs" / f"{name}.log")] = name
        if not running:
            sys.exit(f"these wait for commands that there are not: {', '.join(waiting)}")
        process, status = os.waitpid(-1, 0)
        if process in running:
            name = running.pop(process)
            ended.add(name)
            if os.waitstatus_to_exitcode(status):
                sys.exit(f"{name}: {(ROOT / 'outputs' / f'{name}.log').read_text()}")


def _fork(function: Callable[[], object], log: Path) -> int:
    """Call a function in a fork that writes to ``log``; the process id."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _redirect(log, log)
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(stdout: Path, stderr: Path) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run_command(command: Command, directory: Path) -> None:
    environment = {"NPROC_PER_NODE": str(command.num_processes)} if command.num_processes > 1 else {}
    outputs = ROOT / "outputs" / command.name
    code = _run_packtool(command.words, outputs, environment)
    kind = command.words[0]
    for path in (path for folder in command.writes for path in (ROOT / folder).rglob("*") if kind == "pack"):
        os.utime(path, (MODIFIED_S, MODIFIED_S))  # caches name the times of their sources
    sections = {
        "command": " ".join((*(f"{k}={v}" for k, v in environment.items()), "packtool", shlex.join(command.words))),
        "exit code": str(code),
        **_written(outputs, kind),
        **describe_files(ROOT, command.writes, kind, _PLACES),
    }
    _write_file(directory, command.name, sections)


def _run_lines(name: str, lines: Sequence[Sequence[str]], directory: Path) -> None:
    """Run command lines one after the other in this process: a fork would take longer than most of them."""
    outputs = ROOT / "outputs" / name
    outputs.mkdir(parents=True)
    sections = {}
    environment = dict(os.environ)
    for words in lines:
        for file in ("stdout", "stderr"):
            (outputs / file).write_text("")
        _redirect(outputs / "stdout", outputs / "stderr")
        code = _call_packtool(words)
        os.environ.clear()
        os.environ.update(environment)
        written = "\n".join(text for text in _written(outputs, "").values() if text)
        sections[f"packtool {shlex.join(words)}"] = f"exit code {code}\n{written}"
    _write_file(directory, name, sections)


def _written(outputs: Path, kind: str) -> dict[str, str]:
    return {name: normalize_text((outputs / name).read_text(), kind, _PLACES) for name in ("stdout", "stderr")}


def _write_file(directory: Path, name: str, sections: dict[str, str]) -> None:
    path = directory / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_sections(sections))


def _run_packtool(words: Sequence[str], outputs: Path, environment: dict[str, str]) -> int:
    """Run ``python -m packtool`` in a fork with a process group of its own; the exit code."""
    outputs.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if not process:
        os.setsid()
        _redirect(outputs / "stdout", outputs / "stderr")
        os.environ.update(environment)
        signal.alarm(MAX_SECONDS)
        os._exit(_call_packtool(words))
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _call_packtool(words: Sequence[str]) -> int:
    """Run ``python -m packtool`` in this process; the exit code."""
    sys.argv = ["packtool", *words]
    try:
        runpy.run_module("packtool", run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return -1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # else libraries that nothing here has used complain about what they leave behind
