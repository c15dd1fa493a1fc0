"""``packtool inspect``."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading

import typer

from packtool import storage
from packtool.cli.invocation import Invocation
from packtool.config.inspect import InspectConfig
from packtool.errors import EXIT_INTERRUPTED, EXIT_MISMATCH
from packtool.visible import show, show_json, show_styled

_COLOURS = {"media": "cyan", "plain": "dim", "trained": "green", "truncated": "red"}


def run_inspect(config: InspectConfig, invocation: Invocation) -> None:
    """Print a cache's figures, a sample or a pack; or what a run has trained."""
    from packtool.cli.inspect_run import lines_of, run_inspect_run, shows_run, tell_when_trained
    from packtool.report import inspect
    from packtool.report.names import named
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
    from packtool.report.terminal import TerminalProgress

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
    from packtool.report import damage
    from packtool.report.names import named
    from packtool.report.terminal import TerminalProgress

    with TerminalProgress() as progress:
        found = damage.find_damage(directory, progress)
    if as_json:
        show_json(named(found))
    else:
        show("\n".join(damage.lines(found)))
    if found["damaged"]:
        raise typer.Exit(EXIT_MISMATCH)
