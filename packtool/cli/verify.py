"""``packtool verify``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import typer

from packtool.cli.invocation import Invocation
from packtool.config.verify import VerifyConfig
from packtool.errors import EXIT_MISMATCH, EXIT_OK
from packtool.launch.importing import imported_at_once
from packtool.launch.launcher import find_place
from packtool.visible import show, show_json

if TYPE_CHECKING:
    from packtool.launch.world import World


def run_verify(config: VerifyConfig, invocation: Invocation) -> None:
    """Compare and print; a leak ends with exit code 4, after the report.

    Several processes are started only where they share sequences: otherwise one computes all.
    """
    ranks = config.sequence_parallel_ranks
    world = find_place(
        invocation.arguments,
        ranks,
        partial(_prepare, config),
        starts_none=ranks == 1,
        max_wait=config.ddp_timeout,
    )
    from packtool.report.names import named
    from packtool.report.terminal import TerminalProgress
    from packtool.report.verify import print_report, verify_json, write_page

    with imported_at_once():
        from packtool.train.verify.run import verify

    with TerminalProgress(enabled=world.is_first) as progress:
        report = verify(config, progress, world)
    if not world.is_first:
        # The first one says what is wrong.
        raise typer.Exit(EXIT_OK if report.passed else EXIT_MISMATCH)
    if config.html is not None:
        write_page(report, config.html, invocation.command)
    if invocation.as_json:
        show_json(named(verify_json(report)))
    else:
        print_report(report)
        if config.html is not None:
            show(f"written: {config.html}")
    report.raise_if_failed()


def _prepare(config: VerifyConfig, world: World) -> None:
    import numpy as np

    from packtool.encode.model_files import ModelFiles
    from packtool.train.prepare.sequence_parallel import axes_of

    axes_of(config, world, ModelFiles.load(config.model), np.zeros(0, np.int64))
