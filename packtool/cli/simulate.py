"""``packtool simulate``."""

from __future__ import annotations

from packtool.cli.invocation import Invocation
from packtool.config.simulate import SimulateConfig
from packtool.visible import show, show_json


def run_simulate(config: SimulateConfig, invocation: Invocation) -> None:
    """Simulate, print, and write the page that is asked for."""
    from packtool.report.names import named
    from packtool.report.simulation import assumption_lines, simulation_json, simulation_page, table_lines, title_of
    from packtool.report.tables import print_table
    from packtool.report.terminal import TerminalProgress
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
