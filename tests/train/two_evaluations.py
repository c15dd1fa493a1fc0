"""What two processes evaluate together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.config.commands import EvalConfig
from packtool.errors import MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.evaluate.per_sample import evaluate
from packtool.train.evaluate.run import evaluate_caches
from packtool.train.model.load import load_model
from packtool.train.prepare.evaluation import plan_samples
from tests.forked import run_ranks


def run_two_processes(job: dict[str, Any], scratch: Path) -> None:
    """Run ``main`` on two ranks of this machine's CPU, until both have ended well."""
    run_ranks(2, main, job, scratch=scratch)


def main(job: dict[str, Any]) -> None:
    """Evaluate by the command's function, then in the middle of a training, then what must not be."""
    world = World.from_environment()
    config = EvalConfig(
        model=job["model"],
        cached_dataset=(job["cache"],),
        output=job["output"],
        max_tokens_per_micro_batch=200,
        dataloader_num_workers=0,
    )
    evaluate_caches(config, SilentProgress())
    reader = CacheReader.open([job["cache"]])
    spec = InputSpec.load(job["model"], reader.manifests[0].identity.media_limits)
    model = load_model(job["model"], spec.config, dtype=torch.float32, packing=True).train()
    # What the wrapper would do on its own, exchanging buffers, must not happen: evaluation asks the model inside.
    wrapped = DistributedDataParallel(model)
    plan = plan_samples(reader, world, max_tokens=150)
    results = {"wrapped": evaluate(wrapped, reader, spec, plan, world=world).metrics()}
    assert wrapped.training
    assert model.training
    one = plan_samples(reader, world, limit=1)
    results["single"] = evaluate(wrapped, reader, spec, one, world=world).metrics("")
    sharded = load_model(job["model"], spec.config, dtype=torch.float32, packing=True)
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.model.language_model.layers:
        fully_shard(layer, mesh=mesh)
    # Forward passes of sharded weights wait for one another: a rank without samples must have as many.
    evaluation = evaluate(fully_shard(sharded, mesh=mesh), reader, spec, one, world=world)
    results["sharded"] = evaluation.metrics("")
    try:
        evaluate(wrapped, reader, spec, plan_samples(reader, world, limit=2 + world.rank), world=world)
    except MismatchError as error:
        results["differing"] = type(error).__name__
    Path(job["results"].format(world.rank)).write_text(json.dumps(results))
