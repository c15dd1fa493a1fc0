"""Trainings, evaluations and verifications one after the other on each rank of a process group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from packtool.config.commands import EvalConfig, VerifyConfig
from packtool.progress import SilentProgress
from packtool.train.evaluate.run import evaluate_caches
from packtool.train.run import train
from packtool.train.verify.run import verify
from tests.train.tiny import TinyWorld

Job = tuple[str, Path, dict[str, Any]]
"""``train``, ``eval`` or ``verify``; the directory for what comes of it; settings."""


def run_jobs(tiny: TinyWorld, jobs: list[Job]) -> None:
    """Run all of them on this rank."""
    for kind, output_dir, settings in jobs:
        output_dir.mkdir(parents=True, exist_ok=True)
        _run(tiny, kind, output_dir, settings)


def _run(tiny: TinyWorld, kind: str, output_dir: Path, settings: dict[str, Any]) -> None:
    model = {"model": tiny.model, "cached_dataset": (tiny.cache,)}
    if kind == "train":
        train(tiny.config(output_dir, **settings), SilentProgress())
    elif kind == "eval":
        output = str(output_dir / "eval.parquet")
        evaluate_caches(EvalConfig(**model, output=output, dataloader_num_workers=0, **settings), SilentProgress())
    else:
        report = verify(VerifyConfig(**model, packing_length=256, **settings))
        if os.environ["RANK"] == "0":
            errors = {check.name: [check.error, check.allowed] for check in report.checks}
            (output_dir / "verify.json").write_text(json.dumps(errors))
