"""Runs several trainings one after the other inside one torchrun job, which takes longer to start than they do.

``python -m torch.distributed.run ... --module tests.train.two_processes JOBS``, where JOBS is a JSON file: the tiny
world's directories and a list of [output directory, settings].
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path


def main(jobs_file: str) -> None:
    """Train every job on every rank."""
    # Not above: processes that encode rows import this module again, and torch and transformers with it.
    import torch

    from packtool.progress import SilentProgress
    from packtool.train.run import train
    from tests.train.tiny import TinyWorld

    torch.set_num_threads(1)
    # Every run collects garbage, and what was imported is none.
    gc.freeze()
    jobs = json.loads(Path(jobs_file).read_text())
    tiny = TinyWorld(**jobs["world"])
    for output_dir, settings in jobs["jobs"]:
        train(tiny.config(output_dir, **settings), SilentProgress())
    gc.unfreeze()


if __name__ == "__main__":
    main(sys.argv[1])
