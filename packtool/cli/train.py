"""``packtool train``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import typer

from packtool.config import TrainConfig
from packtool.launch import launch_if_asked, share_cores_politely

# What the command was called with, so that torchrun can call it again in every process.
invocation: Sequence[str] = ()


def run_train(config: TrainConfig, as_json: bool) -> None:
    """Start under torchrun if the environment asks for it, else train and print the summary."""
    share_cores_politely()
    launch_if_asked(invocation)
    from packtool.report.statistics import train_lines
    from packtool.report.terminal import TerminalProgress, print_table
    from packtool.train.run import train
    from packtool.train.world import World

    world = World.from_environment()
    with TerminalProgress(enabled=world.is_first) as progress:
        result = train(config, progress, world)
    if not world.is_first:
        return
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    if config.dry_run:
        print_table("planned, nothing trained (--dry-run)", train_lines(result))
    else:
        print_table(f"trained: {result.checkpoint}", train_lines(result))
