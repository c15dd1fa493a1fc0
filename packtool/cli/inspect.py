"""``packtool inspect``: a cache, or what a run has trained.

``packtool explain``: the code of a message; ``packtool schema``: schemas for editors.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading

import typer

from packtool import storage
from packtool.cli.options import Invocation, interruptible_progress, terminal_progress
from packtool.config.codes import codes
from packtool.config.commands import ExplainConfig, InspectConfig, SchemaConfig
from packtool.config.schema import schema_text
from packtool.constants import TRAIN_SPLIT
from packtool.errors import EXIT_MISMATCH, ConfigError, did_you_mean
from packtool.terminal import show, show_json, show_styled

_COLOURS = {"media": "cyan", "plain": "dim", "trained": "green", "truncated": "red"}


def run_inspect(config: InspectConfig, invocation: Invocation) -> None:
    """Print a cache, sample, pack or run; or verify a cache; or write or serve pages of samples."""
    from packtool.report.trained import is_run

    if is_run(config.directory):
        _inspect_run(config, invocation)
        return
    _refuse_run_options(config)
    if config.verify:
        _verify_files(config.directory, invocation)
    elif config.html is not None:
        _write_pages(config, config.html, invocation)
    elif config.serve:
        _serve_pages(config, invocation)
    elif config.plan is not None and config.pack is not None:
        from packtool.report.inspect import pack_figures, pack_lines

        pack = pack_figures(config.directory, config.plan, config.pack, config.model)
        invocation.show(pack, pack_lines(pack))
    elif config.row is not None:
        _inspect_sample(config, config.row, invocation)
    else:
        _inspect_cache(config.directory, invocation)


def _refuse_run_options(config: InspectConfig) -> None:
    """Raise a ConfigError for an option that requires a run, not a cache."""
    names = {"--trained": config.trained, "--losses": config.shows_losses, f"--step {config.step}": config.step}
    for name, value in names.items():
        if value:
            problem = f"{name}: {config.directory} is not the --output-dir of a run"
            raise ConfigError(problem, f"packtool inspect OUTPUT_DIR {name}")


def _verify_files(directory: str, invocation: Invocation) -> None:
    """Compare the files of a cache with its manifest; exit with code 4 if any is damaged."""
    from packtool.report.inspect import damage_figures, damage_lines

    with terminal_progress() as progress:
        damage = damage_figures(directory, progress)
    invocation.show(damage, damage_lines(damage))
    if damage["damaged"]:
        raise typer.Exit(EXIT_MISMATCH)


def _serve_pages(config: InspectConfig, invocation: Invocation) -> None:
    """Serve pages of all samples of a cache, or of samples of a run with their losses, until Ctrl-C."""
    from packtool.report.samples import Pages, serving

    pages = Pages(config, shows_all=True)
    with serving(pages.content, config.port) as address, contextlib.suppress(KeyboardInterrupt):
        figures = {"address": address, "samples_left_out": pages.num_left_out}
        invocation.show(figures, [*pages.notes, address, "serving pages on this machine until Ctrl-C"])
        threading.Event().wait()


def _inspect_run(config: InspectConfig, invocation: Invocation) -> None:
    """Print what the run in ``config.directory`` has trained: losses, totals, a step, or a sample.

    The first option that is set decides which. ConfigError without one, and for options that apply only to caches.
    """
    from packtool.report import trained

    if config.run is not None:
        raise ConfigError(f"--run requires a cache, but {config.directory} is a run", "Leave --run out.")
    if config.split != TRAIN_SPLIT:
        raise ConfigError(f"--split {config.split}: a run trains the {TRAIN_SPLIT} split", "Leave --split out.")
    if config.shows_losses:
        _inspect_losses(config, invocation)
    elif config.trained:
        figures = trained.trained_figures(config.directory)
        invocation.show(figures, trained.trained_lines(figures))
    elif config.step is not None:
        figures = trained.step_figures(config.directory, config.step, config.model)
        invocation.show(figures, trained.step_lines(figures))
    elif config.row is not None:
        figures = trained.row_figures(config.directory, cache=None, row=config.row, model=config.model)
        invocation.show(figures, trained.row_lines(figures))
    else:
        advice = "Use --trained to show what it has trained, --step N for a step, --row N for a sample, or --losses."
        raise ConfigError(f"{config.directory} is the --output-dir of a run, not a cache", advice)


def _inspect_losses(config: InspectConfig, invocation: Invocation) -> None:
    """Print samples of a run with unusual losses, or write or serve pages of them; export all losses if requested."""
    from packtool.cache.evaluation_file import write_losses
    from packtool.report.losses import RunLosses, losses_lines

    losses = RunLosses(config.directory)
    if config.export_losses is not None:
        write_losses(config.export_losses, losses.columns)
    if config.html is not None:
        _write_pages(config, config.html, invocation)
    elif config.serve:
        _serve_pages(config, invocation)
    else:
        figures = losses.figures()
        invocation.show(figures, losses_lines(figures))


def _inspect_sample(config: InspectConfig, row: int, invocation: Invocation) -> None:
    from packtool.report import inspect, trained
    from packtool.report.tables import print_table

    facts, parts = inspect.sample_view(config.directory, config.split, row, config.model)
    history = None if config.run is None else trained.row_figures(config.run, config.directory, row)
    if invocation.as_json:
        shown = [{"look": part.style, "text": part.text, "weight": part.weight} for part in parts]
        show_json({**dict(facts), "parts": shown, **({} if history is None else {"trained_in": history})})
        return
    print_table(f"{config.directory}, {config.split}, row {row}", facts, "l")
    if sys.stdout.isatty():
        show_styled([(part.weighted_text, _COLOURS[part.style]) for part in parts])
    else:
        show(inspect.marked_text(parts))
    if history is not None:
        show("\n" + "\n".join(trained.row_lines(history)))


def _inspect_cache(directory: str, invocation: Invocation) -> None:
    from packtool.report.inspect import cache_figures, figure_lines
    from packtool.report.tables import histogram_lines, table

    figures = cache_figures(directory)
    invocation.show(figures, table(figures["directory"], figure_lines(figures), "l"))
    if invocation.as_json:
        return
    width = min(shutil.get_terminal_size().columns, 100)
    for name, split in figures["splits"].items():
        show(f"\nsamples of {name} by tokens, up to")
        counts = split["length_histogram"]
        ends = [figures["max_length"] * number / len(counts) for number in range(1, len(counts) + 1)]
        show("\n".join(histogram_lines(counts, ends, width)))


def _write_pages(config: InspectConfig, directory: str, invocation: Invocation) -> None:
    """Write pages of samples to a directory, and print how many samples they show."""
    from packtool.report.samples import INDEX, Pages, write_pages

    pages = Pages(config, shows_all=False)
    with interruptible_progress() as progress:
        num_missing = write_pages(pages, directory, progress)
    index_page, num_samples = storage.join(directory, INDEX), len(pages.numbers)
    limit = "" if num_samples + pages.num_left_out == pages.num_cached else " (--max-samples)"
    if limit and config.plan is not None:
        limit = f", those of the steps that are shown of --plan {config.plan}"
    lines = [*pages.notes, f"written: {index_page}, {num_samples:,} of {pages.num_cached:,} samples{limit}"]
    if num_missing:
        lines.insert(0, f"{num_missing:,} media files are missing: not readable on this machine, or too large to play")
    figures = {"written": index_page, "samples": num_samples, "of": pages.num_cached}
    invocation.show({**figures, "samples_left_out": pages.num_left_out, "media_left_out": num_missing}, lines)


def run_explain(config: ExplainConfig, invocation: Invocation) -> None:
    """Print meaning, example and remedy of a code, given in any case or by its name; without one, list all codes."""
    rows = list(codes().values())
    if not config.code:
        invocation.show([row.figures() for row in rows], [f"{row.code} {row.name}: {row.meaning}" for row in rows])
        return
    word = config.code.strip("[]")
    for row in rows:
        if word.upper() == row.code or word.lower() == row.name:
            invocation.show(row.figures(), row.lines())
            return
    similar = did_you_mean(word.upper(), [row.code for row in rows]) or did_you_mean(word, [row.name for row in rows])
    raise ConfigError(f"there is no code {config.code!r}{similar}", "packtool explain lists all codes.")


def run_schema(config: SchemaConfig, invocation: Invocation) -> None:
    """Print a JSON Schema, or write it to a file."""
    text = schema_text(config.kind)
    if config.output is None:
        show(text.rstrip())
        return
    storage.publish(config.output, text.encode())
    invocation.show({"output": config.output}, [f"written: {config.output}"])
