"""``packtool merge``."""

from __future__ import annotations

import dataclasses

from packtool.cli.invocation import Invocation
from packtool.config.merge import MergeConfig
from packtool.launch.importing import imported_at_once
from packtool.launch.processes import share_cores_politely
from packtool.visible import show, show_json


def run_merge(config: MergeConfig, invocation: Invocation) -> None:
    """Merge and say where the model is."""
    share_cores_politely()
    from packtool.report.terminal import TerminalProgress

    with imported_at_once():
        from packtool.train.model.merge import merge_adapter

    with TerminalProgress() as progress:
        result = merge_adapter(config, progress)
    if invocation.as_json:
        show_json(dataclasses.asdict(result))
        return
    show(f"merged: {result.num_merged:,} modules of {result.base_model}, saved as {result.dtype}")
    show(f"written: {result.output}")
