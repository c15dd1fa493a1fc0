"""``packtool verify``."""

from __future__ import annotations

import os

import typer

from packtool.cli import train
from packtool.config.verify import VerifyConfig
from packtool.errors import EXIT_MISMATCH, EXIT_OK
from packtool.launch.processes import Processes, is_launched, launch_if_asked, share_cores_politely
from packtool.visible import show_json


def run_verify(config: VerifyConfig, as_json: bool) -> None:
    """Compare and print; a leak ends with exit code 4, after the report.

    Several processes are started only where they share rows: there is nothing to share out otherwise.
    """
    share_cores_politely()
    from packtool.launch.world import World

    if config.num_sharing > 1 and not is_launched(os.environ):
        import numpy as np

        from packtool.encode.model_files import ModelFiles
        from packtool.train.prepare.sequence_parallel import axes_of

        started = World(0, Processes.from_environment(os.environ).total).shared_by(config.num_sharing)
        axes_of(config, started, ModelFiles.load(config.model), np.zeros(0, np.int64))
        launch_if_asked(train.invocation)
    from packtool.report.names import named
    from packtool.report.terminal import TerminalProgress
    from packtool.report.verify import print_report, verify_json
    from packtool.train.verify.run import verify

    world = World.from_environment()
    with TerminalProgress(enabled=world.is_first) as progress:
        report = verify(config, progress, world)
    if not world.is_first:
        # The first one says what is wrong.
        raise typer.Exit(EXIT_OK if report.passed else EXIT_MISMATCH)
    if as_json:
        show_json(named(verify_json(report)))
    else:
        print_report(report)
    report.raise_if_failed()
