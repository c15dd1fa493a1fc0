"""``packtool plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtool.cli.invocation import Invocation
from packtool.config.plan import PlanConfig
from packtool.visible import show, show_json

if TYPE_CHECKING:
    from packtool.train.prepare.preview import Preview


def run_plan(config: PlanConfig, invocation: Invocation) -> None:
    """Plan, print, and write what is asked for."""
    from packtool.report.names import named
    from packtool.report.plan import page_content, plan_lines
    from packtool.report.tables import print_table
    from packtool.train.prepare.preview import preview, save_plan

    if config.sweep:
        _sweep(config, invocation)
        return
    if config.fit is not None:
        _fit(config, invocation)
        return
    found = preview(config)
    figures = found.figures(config.tflops, config.mfu)
    name = " ".join(config.cached_dataset) or str(config.lengths)
    if config.save is not None:
        save_plan(found, config)
    if config.html is not None:
        from packtool.report.plan_page import page

        _publish(config.html, page(page_content(found, figures, invocation.command, _title(config))))
    if invocation.as_json:
        show_json(named(figures))
        return
    print_table(f"plan for {name}", plan_lines(figures))
    if found.shared_line is not None:
        show(f"\n{found.shared_line}")
    _print_histograms(found)
    for written in (config.save, config.html):
        if written is not None:
            show(f"written: {written}")


def _sweep(config: PlanConfig, invocation: Invocation) -> None:
    """One row for each packing length."""
    from packtool.report.names import named
    from packtool.report.sweep import sweep_lines, sweep_page
    from packtool.train.prepare.preview import preview

    rows = [preview(config, length).figures(config.tflops, config.mfu) for length in config.sweep_lengths()]
    if config.html is not None:
        _publish(config.html, sweep_page(rows, _title(config), invocation.command))
    if invocation.as_json:
        show_json([named(row) for row in rows])
        return
    show("\n".join(sweep_lines(rows)))
    if config.html is not None:
        show(f"written: {config.html}")


def _fit(config: PlanConfig, invocation: Invocation) -> None:
    """The settings that fit into a GPU, the cheapest first, and the command of the best."""
    from packtool.report.fit import fit_advice, fit_lines, fit_title
    from packtool.report.names import named
    from packtool.report.terminal import TerminalProgress
    from packtool.train.model.fit import find_fit

    with TerminalProgress() as progress:
        figures = find_fit(config, progress).figures()
    if invocation.as_json:
        show_json(named(figures))
        return
    show("\n".join([*fit_title(figures), *fit_lines(figures), *fit_advice(figures, config.hardware)]))


def _publish(path: str, page: str) -> None:
    from packtool import storage

    storage.publish(path, page.encode())


def _title(config: PlanConfig) -> str:
    from packtool.simulate.lengths import names_of

    return names_of(config.cached_dataset or (str(config.lengths),))


def _print_histograms(found: Preview) -> None:
    import shutil

    from packtool.report.plan import fill_counts, length_bins
    from packtool.report.tables import histogram_lines

    width = min(shutil.get_terminal_size().columns, 100)
    show("\nsamples by tokens, up to")
    show("\n".join(histogram_lines(*length_bins(found), width)))
    show("\npacks by fill in percent, up to")
    show("\n".join(histogram_lines(*fill_counts(found), width, rows=10)))
