"""``packtool inspect``.

``packtool inspect`` of a run: what it has trained.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from packtool import storage
from packtool.cli.options import Invocation
from packtool.config.commands import InspectConfig
from packtool.constants import TRAIN_SPLIT
from packtool.errors import EXIT_INTERRUPTED, EXIT_MISMATCH, ConfigError
from packtool.visible import show, show_json, show_styled


def shows_run(config: InspectConfig) -> bool:
    """Whether it is a run that is looked at, and not a cache.

    Raises:
        ConfigError: for an option that looks at the other.
    """
    from packtool.report.trained import is_run

    of_run = config.trained or config.step is not None
    if not is_run(config.directory):
        if of_run:
            name = "--trained" if config.trained else f"--step {config.step}"
            raise ConfigError(
                f"{name}: {config.directory} is not the --output-dir of a run", "packtool inspect OUTPUT_DIR " + name
            )
        return False
    if config.run is not None:
        raise ConfigError(f"--run goes with a cache, and {config.directory} is itself a run", "Leave --run out.")
    if config.split != TRAIN_SPLIT:
        raise ConfigError(f"--split {config.split}: a run trains the {TRAIN_SPLIT} split", "Leave --split out.")
    if not of_run and config.row is None:
        raise ConfigError(
            f"{config.directory} is the --output-dir of a run, and no cache",
            "--trained shows what it has trained, --step N what a step held, --row N when a sample was trained.",
        )
    return True


def run_inspect_run(config: InspectConfig, as_json: bool) -> None:
    """Print what a run has trained, a step, or when a sample was trained."""
    from packtool.report import trained

    if config.trained:
        figures = trained.trained_figures(config.directory)
        _tell(figures, trained.trained_lines(figures), as_json)
    elif config.step is not None:
        figures = trained.step_figures(config.directory, config.step, config.model)
        _tell(figures, trained.step_lines(figures), as_json)
    else:
        assert config.row is not None, "nothing else is shown of a run"
        figures = trained.row_figures(config.directory, None, config.row, config.model)
        _tell(figures, trained.row_lines(figures), as_json)


def tell_when_trained(config: InspectConfig) -> dict[str, Any]:
    """When the sample of ``--row`` was trained in ``--run``."""
    from packtool.report import trained

    assert config.run is not None, "asked for"
    assert config.row is not None, "goes with it"
    return trained.row_figures(config.run, config.directory, config.row)


def lines_of(figures: Mapping[str, Any]) -> Iterator[str]:
    """Lines that tell it on a terminal."""
    from packtool.report import trained

    return trained.row_lines(figures)


def _tell(figures: Mapping[str, Any], lines: Iterator[str], as_json: bool) -> None:
    if as_json:
        show_json(figures)
    else:
        show("\n".join(lines))


_COLOURS = {"media": "cyan", "plain": "dim", "trained": "green", "truncated": "red"}


def run_inspect(config: InspectConfig, invocation: Invocation) -> None:
    """Print a cache's figures, a sample or a pack; or what a run has trained."""
    from packtool.report import inspect
    from packtool.report.statistics import named
    from packtool.report.tables import histogram_lines, print_table

    if shows_run(config):
        run_inspect_run(config, invocation.as_json)
        return
    if config.verify:
        _verify(config.directory, invocation.as_json)
        return
    if config.html is not None or config.serve:
        _leaf_through(config, invocation.as_json)
        return
    if config.plan is not None and config.pack is not None:
        from packtool.report.inspect_pack import pack_figures, pack_lines

        pack = pack_figures(config.directory, config.plan, config.pack, config.model)
        if invocation.as_json:
            show_json(named(pack))
        else:
            show("\n".join(pack_lines(pack)))
        return
    if config.row is not None:
        view = inspect.sample_view(config.directory, config.split, config.row, config.model)
        trained = None if config.run is None else tell_when_trained(config)
        if invocation.as_json:
            parts = [{"look": look, "text": text, "weight": weight} for look, text, weight in view.parts]
            told = {} if trained is None else {"trained_in": trained}
            show_json(named({**dict(view.facts), "parts": parts, **told}))
            return
        print_table(f"{config.directory}, {config.split}, row {config.row}", view.facts, "l")
        show_styled(
            [(text, _COLOURS[look]) for look, text in view.marked()] if sys.stdout.isatty() else [(view.text, "")]
        )
        if trained is not None:
            show("\n" + "\n".join(lines_of(trained)))
        return
    figures = inspect.cache_figures(config.directory)
    if invocation.as_json:
        show_json(named(figures))
        return
    print_table(figures["directory"], inspect.figure_lines(figures), "l")
    for name, split in figures["splits"].items():
        show(f"\nsamples of {name} by tokens, up to")
        width = min(shutil.get_terminal_size().columns, 100)
        counts = split["length_histogram"]
        ends = [figures["max_length"] * number / len(counts) for number in range(1, len(counts) + 1)]
        show("\n".join(histogram_lines(counts, ends, width)))


def _leaf_through(config: InspectConfig, as_json: bool) -> None:
    """Write pages of samples, or serve them until Ctrl-C."""
    from packtool.report.samples import INDEX, Pages, write_pages
    from packtool.report.serve import serving
    from packtool.report.tables import TerminalProgress

    pages = Pages(config, is_whole=config.serve)
    if config.html is None:
        with serving(pages.content, config.port) as address, contextlib.suppress(KeyboardInterrupt):
            if as_json:
                show_json({"address": address})
            else:
                show(f"{address}\nshows the pages on this machine, until Ctrl-C ends it")
            threading.Event().wait()
        return
    with TerminalProgress() as progress:
        try:
            num_missing = write_pages(pages, config.html, progress)
        except KeyboardInterrupt:
            progress.note("interrupted; the same command begins anew")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    written = storage.join(config.html, INDEX)
    if as_json:
        show_json(
            {"written": written, "samples": len(pages.numbers), "of": pages.num_cached, "media_left_out": num_missing}
        )
        return
    if num_missing:
        show(f"{num_missing:,} files of media are left out: they cannot be read here, or are too large to be played")
    some = f"{len(pages.numbers):,} of {pages.num_cached:,} samples"
    why = " (--max-samples)" if config.plan is None else f", those of the steps that are shown of --plan {config.plan}"
    show(f"written: {written}, {some}" + ("" if len(pages.numbers) == pages.num_cached else why))


def _verify(directory: str, as_json: bool) -> None:
    """Print what is damaged; exits with 4 if anything is."""
    from packtool.report import inspect as inspect_report
    from packtool.report.statistics import named
    from packtool.report.tables import TerminalProgress

    with TerminalProgress() as progress:
        found = inspect_report.find_damage(directory, progress)
    if as_json:
        show_json(named(found))
    else:
        show("\n".join(inspect_report.lines(found)))
    if found["damaged"]:
        raise typer.Exit(EXIT_MISMATCH)
