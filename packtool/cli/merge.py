"""``packtool merge``."""

from __future__ import annotations

import dataclasses
import json

import typer

from packtool.config.merge import MergeConfig
from packtool.launch import share_cores_politely


def run_merge(config: MergeConfig, as_json: bool) -> None:
    """Merge and say where the model is."""
    share_cores_politely()
    from packtool.report.terminal import TerminalProgress
    from packtool.train.merge import merge

    with TerminalProgress() as progress:
        result = merge(config, progress)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
        return
    typer.echo(f"merged: {result.num_merged:,} modules of {result.base_model}, saved as {result.dtype}")
    typer.echo(f"written: {result.output}")
