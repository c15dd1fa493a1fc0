"""``packtool plan``, ``packtool simulate`` and ``packtool pack``."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

from packtool.cli.options import Invocation, interruptible_progress, terminal_progress
from packtool.config.plan import PackConfig, PlanConfig
from packtool.config.simulate import SimulateConfig
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.terminal import show, show_json

if TYPE_CHECKING:
    from packtool.library.planned import Plan
    from packtool.train.loop.media_times import LoadingTimes
    from packtool.train.model.memory import MemoryEstimate
    from packtool.train.prepare.preview import Preview


def run_plan(config: PlanConfig, invocation: Invocation) -> None:
    """Print the plan of an epoch and write the requested files; or show a resumed run, a sweep, or fitting settings."""
    if config.resume is not None:
        from packtool.report.plan import resumed_lines
        from packtool.train.prepare.preview import resumed_figures

        figures = resumed_figures(config)
        invocation.show(figures, resumed_lines(figures))
    elif config.sweep:
        _sweep(config, invocation)
    elif config.fit is not None:
        from packtool.report.plan import fit_lines
        from packtool.train.model.fit import find_fit

        with terminal_progress() as progress:
            figures = find_fit(config, progress).figures()
        invocation.show(figures, fit_lines(figures, config.hardware))
    else:
        _plan(config, invocation)


def _plan(config: PlanConfig, invocation: Invocation) -> None:
    """Plan an epoch, write the requested files, and print the plan."""
    from packtool.library.planned import Plan
    from packtool.train.prepare.checkpoint import BatchShape
    from packtool.train.prepare.lock_file import lock_file_content, write_lock

    plan = Plan(config)
    if config.save is not None:
        plan.save(config.save)
    if config.lock is not None:
        inputs, num_ranks = plan.preview.inputs, plan.preview.options.world_size
        write_lock(config.lock, lock_file_content(inputs, BatchShape.of(config, num_ranks)))
    if config.html is not None:
        plan.page(config.html, invocation.command)
    if invocation.as_json:
        show_json(plan.summary | _estimates(config, plan.preview))
    else:
        _print_plan(plan, config)


def _estimates(config: PlanConfig, preview: Preview) -> dict[str, Any]:
    """Return the estimates of memory and loading that ``config`` requests, for ``--json``."""
    estimates: dict[str, Any] = {}
    if config.model is not None:
        memory = _memory(config, preview)
        if isinstance(memory, str):  # why it is unknown
            estimates["memory_gib"] = None
        else:
            estimates["memory_gib"] = memory.total
            stages = _recomputation(config, preview)
            if stages:
                estimates["recomputation"] = [figures for figures, _ in stages]
    if config.media:
        estimates["media"] = _loading_times(config, preview).figures()
    return estimates


def _print_plan(plan: Plan, config: PlanConfig) -> None:
    """Print the tables and histograms of a plan, and the estimates of memory and loading that ``config`` requests."""
    from packtool.report.tables import print_table

    preview = plan.preview
    data_name = " ".join(config.cached_dataset) or config.mix or config.lengths
    scope = "an epoch of the first stage of " if preview.inputs.stages else ""
    print_table(f"plan for {scope}{data_name}", plan.lines)
    _print_sources(preview)
    for line in (preview.batch_line, preview.shared_line):
        if line is not None:
            show(f"\n{line}")
    _print_histograms(preview)
    if config.model is not None:
        # The estimate takes seconds, so all immediate results are printed before it.
        _print_memory(config, preview)
    if config.media:
        loading_times = _loading_times(config, preview)
        print_table("\nmedia, loaded on this machine", loading_times.table())
        show("\n".join(["", *loading_times.sentences()]))
    for path in (config.save, config.lock, config.html):
        if path is not None:
            show(f"written: {path}")


def _print_sources(preview: Preview) -> None:
    """Print the samples of each source of a mixture, in every stage or in an epoch."""
    from packtool.report.tables import print_table, source_rows
    from packtool.train.prepare.timeline import stage_title

    if preview.inputs.stages:
        for figures in preview.timeline.figures():
            print_table(f"\n{stage_title(figures)}, {figures['samples']:,} samples", source_rows(figures["sources"]))
        return
    sources = preview.source_figures
    if sources is not None:
        print_table("\nsamples of each source in an epoch", source_rows(sources))


def _print_histograms(preview: Preview) -> None:
    """Print the histograms of the tokens of samples and of the fill of packs."""
    from packtool.report.tables import fill_histogram, histogram_lines, length_histogram

    width = min(shutil.get_terminal_size().columns, 100)
    lengths = length_histogram(preview.plan.packs.full_lengths)
    show("\nsamples by tokens, up to")
    show("\n".join(histogram_lines(lengths.counts, lengths.edges[1:], width)))
    fills = fill_histogram(preview.plan.full_packs, num_bins=10)
    show("\npacks by fill in percent, up to")
    show("\n".join(histogram_lines(fills.counts, fills.edges[1:], width, max_bars=10)))


def _print_memory(config: PlanConfig, preview: Preview) -> None:
    """Print the estimated memory of a rank, and whether it fits on the hardware that ``config`` names."""
    from packtool.simulate.hardware import read_hardware

    memory = _memory(config, preview)
    if isinstance(memory, str):  # why it is unknown
        show(f"\n{memory}")
        return
    show(f"\n{memory.sentence()}")
    if config.hardware is not None:
        show(memory.sentence_on(read_hardware(config.hardware)))
    for _, line in _recomputation(config, preview):
        show(line)


def _sweep(config: PlanConfig, invocation: Invocation) -> None:
    """Plan an epoch for each packing length of ``--sweep``, print a table to compare them, and write it with --html."""
    from packtool import storage
    from packtool.report.plan import sweep_cells, sweep_page
    from packtool.report.tables import aligned
    from packtool.simulate.run import names_of
    from packtool.train.prepare.preview import preview

    plans = [preview(config, packing_length) for packing_length in config.sweep_lengths()]
    figures = [plan.figures(config.tflops, config.mfu) for plan in plans]  # of each plan, by name
    lines = aligned(sweep_cells(figures), "r")
    no_sharing_reasons = dict.fromkeys(plan.inputs.no_sharing_reason for plan in plans)  # each once; None: no message
    for reason in no_sharing_reasons:
        if reason is not None:
            lines += ["", reason]
    if config.html is not None:
        paths = config.cached_dataset or (str(config.mix or config.lengths),)
        title = names_of(paths)
        storage.publish(config.html, sweep_page(figures, title, invocation.command).encode())
        lines.append(f"written: {config.html}")
    invocation.show(figures, lines)


def _memory(config: PlanConfig, preview: Preview) -> MemoryEstimate | str:
    """Return the estimated memory of a rank, or a sentence about why it is unknown."""
    with terminal_progress() as progress:
        progress.start("tracing memory", None)
        try:
            from packtool.train.model.memory import planned_memory

            return planned_memory(config, preview)
        except (ConfigError, UnsupportedModelError) as error:
            return f"memory per rank is unknown: {error.message}"


def _recomputation(config: PlanConfig, preview: Preview) -> list[tuple[dict[str, Any] | None, str]]:
    """Return figures and a line about the layers that ``--gradient-checkpointing auto`` recomputes, for each stage."""
    with terminal_progress() as progress:
        progress.start("planning recomputation", None)
        from packtool.train.model.recompute import plan_recomputation_of_preview

        return plan_recomputation_of_preview(config, preview)


def _loading_times(config: PlanConfig, preview: Preview) -> LoadingTimes:
    from packtool.train.loop.media_times import measure_media

    with terminal_progress() as progress:
        return measure_media(config, preview, progress)


def run_simulate(config: SimulateConfig, invocation: Invocation) -> None:
    """Simulate every strategy, print the result, and write the requested page."""
    from packtool import storage
    from packtool.report.simulation import simulation_lines, simulation_page
    from packtool.simulate.run import run_simulation

    with terminal_progress() as progress:
        simulation = run_simulation(config, progress)
    lines = simulation_lines(simulation)
    if config.html is not None:
        storage.publish(config.html, simulation_page(simulation, invocation.command).encode())
        lines.append(f"written: {config.html}")
    invocation.show(simulation.figures(), lines)


def run_pack(config: PackConfig, invocation: Invocation) -> None:
    """Write packs and print the summary."""
    from packtool.packs.write import write_packs
    from packtool.report.drawing import plural
    from packtool.report.tables import filled_lines, table

    with interruptible_progress() as progress:
        summary = write_packs(config, progress)
    figures = dataclasses.asdict(summary)
    fill = summary.tokens / (summary.num_packs * summary.packing_length)
    values = {"has_plan": config.plan is not None, "fill": fill, "files": plural(summary.num_files, "file")}
    lines = filled_lines("pack", figures | values)
    invocation.show(figures, table(f"{summary.format} packs in {summary.output_dir}", lines))
