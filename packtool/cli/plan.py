"""``packtool plan``."""

from __future__ import annotations

import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

import typer

from packtool.config.plan import PlanConfig

if TYPE_CHECKING:
    from packtool.train.preview import Preview

_COLUMNS = ("capacity", "packs", "samples_per_pack", "fill", "over_lower_bound", "steps_per_epoch", "filtered")


def run_plan(config: PlanConfig, as_json: bool) -> None:
    """Plan, print, and write what is asked for."""
    from packtool.report.names import named
    from packtool.report.plan import content_of, plan_lines
    from packtool.report.terminal import print_table
    from packtool.train.preview import preview, save_plan

    if config.sweep:
        _sweep(config, as_json)
        return
    found = preview(config)
    figures = found.figures(config.tflops, config.mfu)
    name = " ".join(config.cached_dataset) or str(config.lengths)
    if config.save is not None:
        save_plan(found, config)
    if config.html is not None:
        from packtool import storage
        from packtool.report.page import page

        storage.publish(config.html, page(content_of(found, figures, _command(config), name)).encode())
    if as_json:
        typer.echo(json.dumps(named(figures)))
        return
    print_table(f"plan for {name}", plan_lines(figures))
    _print_histograms(found)
    for written in (config.save, config.html):
        if written is not None:
            typer.echo(f"written: {written}")


def _sweep(config: PlanConfig, as_json: bool) -> None:
    """One row for each packing length."""
    from packtool.report.names import named
    from packtool.train.preview import preview

    rows = [preview(config, length).figures(config.tflops, config.mfu) for length in config.sweep_lengths()]
    if as_json:
        typer.echo(json.dumps([named(row) for row in rows]))
        return
    typer.echo("  ".join(f"{name.replace('_', ' '):>16}" for name in _COLUMNS))
    for row in rows:
        typer.echo("  ".join(f"{_shown(name, row[name]):>16}" for name in _COLUMNS))


def _shown(name: str, value: Any) -> str:
    if name in ("fill", "over_lower_bound"):
        return f"{value:.2%}"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _print_histograms(found: Preview) -> None:
    import shutil

    from packtool.report.inspect import histogram_lines
    from packtool.report.plan import fill_counts, length_counts

    width = min(shutil.get_terminal_size().columns, 100)
    typer.echo("\nsamples by tokens, up to")
    typer.echo("\n".join(histogram_lines(*length_counts(found), width)))
    typer.echo("\npacks by percent full, up to")
    typer.echo("\n".join(histogram_lines(*fill_counts(found), width, rows=10)))


def _command(config: PlanConfig) -> str:
    return shlex.join(["packtool", *sys.argv[1:]]) if len(sys.argv) > 1 else f"packtool plan {config.lengths or ''}"
