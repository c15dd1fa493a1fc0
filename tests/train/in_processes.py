"""Runs trainings, evaluations and verifications one after the other inside one torchrun job.

``torchrun ... --module tests.train.in_processes JOBS``, where JOBS is a JSON file: the tiny world's directories and a
list of [kind, output directory, settings], the kinds being ``train``, ``eval`` and ``verify``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from packtool.eval_options import EvalConfig
from packtool.progress import SilentProgress
from packtool.train.run import train
from packtool.train.run_eval import evaluate_caches
from packtool.train.verify import verify
from packtool.verify_options import VerifyConfig
from tests.train.tiny import TinyWorld


def run(tiny: TinyWorld, kind: str, output_dir: str, settings: dict[str, Any]) -> None:
    """One job, on this rank."""
    model = {"model": tiny.model, "cached_dataset": (tiny.cache,)}
    if kind == "train":
        train(tiny.config(output_dir, **settings), SilentProgress())
    elif kind == "eval":
        output = str(Path(output_dir) / "eval.parquet")
        given: dict[str, Any] = {**model, "output": output, "dataloader_num_workers": 0, **settings}
        evaluate_caches(EvalConfig(**given), SilentProgress())
    else:
        given = {**model, "packing_length": 256, **settings}
        report = verify(VerifyConfig(**given))
        if os.environ.get("RANK", "0") == "0":
            Path(output_dir).mkdir(parents=True)
            found = {check.name: [check.error, check.allowed] for check in report.checks}
            (Path(output_dir) / "verify.json").write_text(json.dumps(found))


def main(jobs_file: str) -> None:
    """Every job, on every rank."""
    torch.set_num_threads(1)
    jobs = json.loads(Path(jobs_file).read_text())
    for kind, output_dir, settings in jobs["jobs"]:
        run(TinyWorld(**jobs["world"]), kind, output_dir, settings)


if __name__ == "__main__":
    main(sys.argv[1])
