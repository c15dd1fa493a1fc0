"""``packtool verify``."""

from __future__ import annotations

import json

import typer

from packtool.launch import share_cores_politely
from packtool.verify_options import VerifyConfig


def run_verify(config: VerifyConfig, as_json: bool) -> None:
    """Compare and print; a leak ends with exit code 4, after the report."""
    share_cores_politely()
    from packtool.report.terminal import TerminalProgress
    from packtool.report.verify import print_report, verify_json
    from packtool.train.verify import verify

    with TerminalProgress() as progress:
        report = verify(config, progress)
    if as_json:
        typer.echo(json.dumps(verify_json(report)))
    else:
        print_report(report)
    report.raise_if_failed()
