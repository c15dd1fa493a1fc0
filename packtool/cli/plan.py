"""``packtool plan``.

``packtool simulate``.

``packtool pack``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from packtool.cli.options import Invocation
from packtool.config.plan import PackConfig, PlanConfig
from packtool.config.simulate import SimulateConfig
from packtool.errors import EXIT_INTERRUPTED
from packtool.visible import show, show_json

if TYPE_CHECKING:
    from packtool.train.loop.media_times import LoadingTimes
    from packtool.train.model.memory import MemoryEstimate
    from packtool.train.prepare.preview import Preview


def run_plan(config: PlanConfig, invocation: Invocation) -> None:
    """Plan, print, and write what is asked for."""
    if config.resume is not None:
        _resumed(config, invocation)
        return
    if config.sweep:
        _sweep(config, invocation)
        return
    if config.fit is not None:
        _fit(config, invocation)
        return
    from packtool.library.planned import Plan
    from packtool.report.statistics import source_rows
    from packtool.report.tables import print_table
    from packtool.train.prepare.timeline import stage_title

    plan = Plan(config)
    if config.save is not None:
        plan.save(config.save)
    if config.html is not None:
        plan.page(config.html, invocation.command)
    if invocation.as_json:
        summary = plan.summary
        if config.model is not None:
            memory = _memory(config, plan.preview)
            summary["memory_gib"] = None if isinstance(memory, str) else memory.total
        if config.media:
            summary["media"] = _media(config, plan.preview).figures()
        show_json(summary)
        return
    of = "an epoch of the first stage of " if plan.preview.inputs.stages else ""
    print_table(f"plan for {of}{' '.join(config.cached_dataset) or config.mix or config.lengths}", plan.lines)
    if plan.preview.inputs.stages:
        for stage in plan.preview.timeline.figures():
            print_table(f"\n{stage_title(stage)}, {stage['samples']:,} samples", source_rows(stage["sources"]))
    elif (sources := plan.preview.source_figures) is not None:
        print_table("\nwhat an epoch has of each source", source_rows(sources))
    for line in (plan.preview.batch_line, plan.preview.shared_line):
        if line is not None:
            show(f"\n{line}")
    _print_histograms(plan.preview)
    if config.model is not None:
        # Behind all that is known at once, for it takes seconds.
        _print_memory(config, plan.preview)
    if config.media:
        times = _media(config, plan.preview)
        print_table("\nmedia, loaded on this machine", times.table())
        show("\n".join(["", *times.sentences()]))
    for written in (config.save, config.html):
        if written is not None:
            show(f"written: {written}")


def _resumed(config: PlanConfig, invocation: Invocation) -> None:
    """How a run would go on, and what has become of its data."""
    from packtool.report.plan import resumed_lines
    from packtool.train.prepare.preview import resumed_figures

    figures = resumed_figures(config)
    if invocation.as_json:
        show_json(figures)
        return
    show("\n".join(resumed_lines(figures)))


def _sweep(config: PlanConfig, invocation: Invocation) -> None:
    """One row for each packing length."""
    from packtool import storage
    from packtool.report.plan import sweep_lines, sweep_page
    from packtool.report.statistics import named
    from packtool.simulate.run import names_of
    from packtool.train.prepare.preview import preview

    plans = [preview(config, length) for length in config.sweep_lengths()]
    rows = [plan.figures(config.tflops, config.mfu) for plan in plans]
    if config.html is not None:
        title = names_of(config.cached_dataset or (str(config.mix or config.lengths),))
        storage.publish(config.html, sweep_page(rows, title, invocation.command).encode())
    if invocation.as_json:
        show_json([named(row) for row in rows])
        return
    show("\n".join(sweep_lines(rows)))
    for remark in dict.fromkeys(plan.inputs.unshared for plan in plans if plan.inputs.unshared is not None):
        show(f"\n{remark}")
    if config.html is not None:
        show(f"written: {config.html}")


def _fit(config: PlanConfig, invocation: Invocation) -> None:
    """The settings that fit into a GPU, the cheapest first, and the command of the best."""
    from packtool.report.plan import fit_advice, fit_lines, fit_title
    from packtool.report.statistics import named
    from packtool.report.tables import TerminalProgress
    from packtool.train.model.fit import find_fit

    with TerminalProgress() as progress:
        figures = find_fit(config, progress).figures()
    if invocation.as_json:
        show_json(named(figures))
        return
    show("\n".join([*fit_title(figures), *fit_lines(figures), *fit_advice(figures, config.hardware)]))


def _memory(config: PlanConfig, found: Preview) -> MemoryEstimate | str:
    """What a rank would hold, or why nobody knows."""
    from packtool.errors import ConfigError, UnsupportedModelError
    from packtool.report.tables import TerminalProgress

    with TerminalProgress() as progress:
        progress.start("tracing memory", None)
        try:
            from packtool.train.model.memory import planned_memory

            return planned_memory(config, found)
        except (ConfigError, UnsupportedModelError) as error:
            return f"the memory of a rank is not known: {error.message}"
        finally:
            progress.finish()


def _print_memory(config: PlanConfig, found: Preview) -> None:
    from packtool.simulate.run import read_hardware

    memory = _memory(config, found)
    if isinstance(memory, str):
        show("\n" + memory)
        return
    show("\n" + memory.sentence())
    if config.hardware is not None:
        show(memory.sentence_on(read_hardware(config.hardware)))


def _media(config: PlanConfig, found: Preview) -> LoadingTimes:
    """What loading takes on this machine."""
    from packtool.report.tables import TerminalProgress
    from packtool.train.loop.media_times import measure_media

    with TerminalProgress() as progress:
        return measure_media(config, found, progress)


def _print_histograms(found: Preview) -> None:
    import shutil

    from packtool.report.plan import fill_histogram, length_histogram
    from packtool.report.tables import histogram_lines

    width = min(shutil.get_terminal_size().columns, 100)
    show("\nsamples by tokens, up to")
    lengths, fills = length_histogram(found.plan.packs.full_lengths), fill_histogram(found.plan.whole_packs, 10)
    show("\n".join(histogram_lines(lengths.counts, lengths.edges[1:], width)))
    show("\npacks by fill in percent, up to")
    show("\n".join(histogram_lines(fills.counts, fills.edges[1:], width, rows=10)))


def run_simulate(config: SimulateConfig, invocation: Invocation) -> None:
    """Simulate, print, and write the page that is asked for."""
    from packtool.report.simulation import assumption_lines, simulation_json, simulation_page, table_lines, title_of
    from packtool.report.statistics import named
    from packtool.report.tables import TerminalProgress, print_table
    from packtool.simulate.run import run_simulation

    with TerminalProgress() as progress:
        found = run_simulation(config, progress)
    if config.html is not None:
        from packtool import storage

        storage.publish(config.html, simulation_page(found, invocation.command).encode())
    if invocation.as_json:
        show_json(named(simulation_json(found)))
        return
    show(title_of(found))
    show("\n".join(table_lines(found)))
    print_table("\nwhat the times rest on", assumption_lines(found), "l")
    if config.html is not None:
        show(f"written: {config.html}")


def run_pack(config: PackConfig, invocation: Invocation) -> None:
    """Write packs, and say what was written."""
    from packtool.packs.write import write_packs
    from packtool.report.drawing import plural
    from packtool.report.statistics import named
    from packtool.report.tables import TerminalProgress, print_table

    with TerminalProgress() as progress:
        try:
            summary = write_packs(config, progress)
        except KeyboardInterrupt:
            progress.note("interrupted; the same command begins anew")
            raise typer.Exit(EXIT_INTERRUPTED) from None
    if invocation.as_json:
        show_json(named(dataclasses.asdict(summary)))
        return
    lines = [
        ("packs", f"{summary.packs:,} of at most {summary.capacity:,} tokens, in {plural(summary.files, 'file')}"),
        ("samples", f"{summary.samples:,}"),
        ("  left out, too long" if config.plan is None else "  not in the plan", f"{summary.filtered:,}"),
        ("tokens", f"{summary.tokens:,}, fill {summary.tokens / (summary.packs * summary.capacity):.2%}"),
        ("  target tokens", f"{summary.target_tokens:,}"),
    ]
    print_table(f"{summary.format} packs in {summary.output_dir}", lines)
