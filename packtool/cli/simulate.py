"""``packtool simulate``."""

from __future__ import annotations

import shlex
import sys

from packtool.config.simulate import SimulateConfig
from packtool.visible import show, show_json


def run_simulate(config: SimulateConfig, as_json: bool) -> None:
    """Simulate, print, and write the page that is asked for."""
    from packtool.report.names import named
    from packtool.report.simulation import assumption_text, simulation_json, simulation_page, table_lines, title_of
    from packtool.report.terminal import TerminalProgress
    from packtool.simulate.run import run_simulation

    with TerminalProgress() as progress:
        found = run_simulation(config, progress)
    if config.html is not None:
        from packtool import storage

        command = shlex.join(["packtool", *sys.argv[1:]])
        storage.publish(config.html, simulation_page(found, command).encode())
    if as_json:
        show_json(named(simulation_json(found)))
        return
    show(title_of(found))
    show("\n".join(table_lines(found)))
    show("\nwhat the times rest on")
    show("\n".join(assumption_text(found)))
    if config.html is not None:
        show(f"written: {config.html}")
