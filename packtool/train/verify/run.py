"""``packtool verify``: checks that the user's model gives the same outputs for packed and unpacked samples."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from packtool.attention.choose import choose
from packtool.attention.parallel.blocks import choose_blocks
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import set_attention
from packtool.attention.support import refuse_leaky_inputs, refuse_unsupported
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.config.commands import VerifyConfig
from packtool.constants import MIN_SHARED
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, DataError
from packtool.launch.world import World
from packtool.planning.packing import pack, pack_trees
from packtool.planning.prefix_trees import PrefixTrees
from packtool.progress import Progress, SilentProgress
from packtool.train.model.load import load_model, quiet_transformers, resolve_dtype
from packtool.train.model.trainable import without_dropout
from packtool.train.prepare.caches import open_caches
from packtool.train.prepare.sequence_parallel import axes_of
from packtool.train.prepare.shared_prefixes import find_shared
from packtool.train.verify.checks import (
    Check,
    PackUnderTest,
    check_gradients,
    check_isolation,
    check_logits,
    check_loss,
    check_prefixes,
    raise_if_failed,
    worst_of,
)
from packtool.train.verify.trajectory import TrainedStep, compare_trajectories, plan_steps


@dataclass(frozen=True)
class VerifyReport:
    """Results of ``packtool verify``.

    Args:
        model: directory.
        device, dtype: of the computation.
        attention: name of the attention kernel.
        num_packs, num_samples, num_tokens: compared; tokens of a shared prefix count for each of its samples.
        num_shared_tokens: tokens of ``num_tokens`` that shared prefixes saved.
        checks: the worst result of each check.
        seconds: of the whole command.
        trajectory: losses of each step, with ``--trajectory``.
    """

    model: str
    device: str
    dtype: str
    attention: str
    num_packs: int
    num_samples: int
    num_tokens: int
    num_shared_tokens: int
    checks: tuple[Check, ...]
    seconds: float
    trajectory: tuple[TrainedStep, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    def raise_if_failed(self) -> None:
        """Raise a MismatchError, exit code 4, that names every failed check."""
        raise_if_failed(self.checks, shares_prefixes=self.num_shared_tokens > 0)


def verify(config: VerifyConfig, progress: Progress | None = None, world: World | None = None) -> VerifyReport:
    """Compare packed with unpacked samples; failed checks are reported, not raised.

    With sequence parallelism, all processes that split a sequence call this; ``world`` is by default torchrun's.
    """
    begin = time.perf_counter()
    progress = progress or SilentProgress()
    world = (world or World.from_environment()).shared_by(config.sequence_parallel_ranks)
    files = ModelFiles.load(config.model)
    reader = open_caches(config.cached_dataset, config, files)
    spec = InputSpec.load(files.directory, reader.manifests[0].identity.media_limits, config)
    refuse_unsupported(spec.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.trajectory is not None:
        packs, results = _verify_trajectory(config, reader, spec, device, progress)
    else:
        packs, results = _verify_packs(config, reader, spec, device, progress, files=files, world=world)
    samples = np.concatenate(packs)  # positions in the caches
    return VerifyReport(
        model=config.model,
        num_packs=len(packs),
        num_samples=len(samples),
        num_tokens=int(reader.index.length[samples].sum()),
        seconds=time.perf_counter() - begin,
        **results,
    )


def _verify_packs(
    config: VerifyConfig,
    reader: CacheReader,
    spec: InputSpec,
    device: torch.device,
    progress: Progress,
    *,
    files: ModelFiles,
    world: World,
) -> tuple[Sequence[Sequence[int]], dict[str, Any]]:
    """Run all checks on some packs; return the samples of each pack, and fields of ``VerifyReport``."""
    capacity = _capacity(config, reader)
    shared, warning = find_shared(config, files.config, reader, capacity=capacity, max_length=capacity)
    if warning is not None:
        progress.note(warning)
    packs = choose_packs(reader, config, None if shared is None else shared.trees)
    dtype = resolve_dtype(spec.config, config, on_gpu=device.type == "cuda")
    kernel = choose(config.attn_impl, device, dtype).name
    samples = [[reader.sample(position) for position in positions] for positions in packs]
    collate, min_shared = (collate_packs, None) if shared is None else (collate_tree, MIN_SHARED)
    for pack_samples in samples:
        refuse_leaky_inputs(collate(pack_samples, spec).model_inputs())
    parallel = None
    if world.sequence_parallel_size > 1:
        device = PartialState(cpu=device.type == "cpu", **config.group_options).device  # starts the process group
        axes = axes_of(config, world, files, reader.index.length)
        parallel = SequenceParallel.on_mesh(axes, device.type)
        text = spec.config.get_text_config()
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        blocks = choose_blocks(config.attn_impl, device, dtype, head_dims=(head_dim, head_dim))
        kernel = f"{blocks.name} blocks, {axes.name}"
    with quiet_transformers():
        model: PreTrainedModel = load_model(config.model, spec.config, dtype=dtype, packing=False)
        model = model.to(device)  # type: ignore[arg-type]  # to is overloaded
        set_attention(model, config.attn_impl, parallel)
        make_pack = partial(PackUnderTest, model, spec=spec, dtype=dtype, parallel=parallel, min_shared=min_shared)
        # With sequence parallelism, every second pack has samples that are computed on a single rank.
        tested_packs = [make_pack(each, some_local=number % 2 == 1) for number, each in enumerate(samples)]
        functions = (check_isolation, check_prefixes, check_logits, check_loss, check_gradients)
        calls = [
            (function, pack)
            for pack in tested_packs
            for function in functions
            if function is not check_prefixes or pack.is_tree
        ]
        checks: list[Check] = []
        progress.start("verify", len(calls))
        with without_dropout(model):
            for function, tested_pack in calls:
                checks.append(function(tested_pack))
                progress.advance(1)
        progress.finish()
    return packs, {
        "device": device.type if device.type == "cpu" else str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "attention": kernel,
        "num_shared_tokens": sum(tested_pack.num_shared_tokens for tested_pack in tested_packs),
        "checks": tuple(worst_of(checks)),
    }


def _verify_trajectory(
    config: VerifyConfig, reader: CacheReader, spec: InputSpec, device: torch.device, progress: Progress
) -> tuple[Sequence[Sequence[int]], dict[str, Any]]:
    """Train packed and unpacked steps; return the samples of each pack, and fields of ``VerifyReport``."""
    steps = plan_steps(config, _capacity(config, reader), reader)
    packs = [pack for step in steps for pack in step.packs]

    def load() -> PreTrainedModel:
        """A new model with the initial weights, for each of the two trainings."""
        model = load_model(config.model, spec.config, dtype=torch.float32, packing=True, attn_impl=config.attn_impl)
        return model.to(device)  # type: ignore[arg-type]  # to is overloaded

    kernel = choose(config.attn_impl, device, torch.float32).name
    with quiet_transformers():
        trained_steps, checks = compare_trajectories(load, steps, reader.sample, spec, progress)
    return packs, {
        "device": str(device),
        "dtype": "float32",
        "attention": kernel,
        "num_shared_tokens": 0,
        "checks": checks,
        "trajectory": trained_steps,
    }


def _capacity(config: VerifyConfig, reader: CacheReader) -> int:
    """Return the maximum tokens of a pack."""
    return config.packing_length or max(manifest.max_length for manifest in reader.manifests)


def choose_packs(reader: CacheReader, config: VerifyConfig, trees: PrefixTrees | None = None) -> list[list[int]]:
    """Choose ``--num-packs`` packs of at least two samples; return the positions of their samples in the caches.

    Packs with shared prefixes (in ``trees``) come before packs without. If possible, the first pack has media, too.

    Raises:
        ConfigError: if no pack has two samples.
        DataError: if every sample is longer than a pack.
    """
    capacity = _capacity(config, reader)
    index = reader.index
    fitting = np.flatnonzero(index.length <= capacity)
    if not len(fitting):
        raise DataError(
            f"none of the {len(reader):,} samples fits into a pack of {capacity:,} tokens",
            f"Raise --packing-length; the shortest sample has {int(index.length.min(initial=0)):,} tokens.",
        )
    if trees is not None:
        plan = pack_trees(trees, index.length, capacity, seed=config.seed)
    else:
        plan = pack(index.length[fitting], capacity, seed=config.seed)
        plan = dataclasses.replace(plan, samples=fitting[plan.samples])
    candidates = np.flatnonzero(np.diff(plan.offsets) > 1)  # packs of at least two samples
    if not len(candidates):
        raise ConfigError(
            f"--packing-length {capacity}: no two samples share a pack, so there is nothing to compare",
            "Raise it so that the two shortest samples fit into a pack.",
        )
    shared_tokens = np.zeros(plan.num_packs, np.int64) if plan.shared is None else plan.sums_per_pack(plan.shared)
    has_prefix = shared_tokens[candidates] > 0
    has_media = plan.sums_per_pack(index.media_tokens[plan.samples])[candidates] > 0
    # The first pack is the best one: with a prefix and media, else with a prefix, else with media, else any.
    first = candidates[np.argmax(2 * has_prefix + has_media)]
    # The other packs with prefixes, and those without, stay in the random order of the plan.
    ordered = [*candidates[has_prefix], *candidates[~has_prefix]]
    chosen = [first, *(number for number in ordered if number != first)][: config.num_packs]
    return [plan.pack(number).tolist() for number in chosen]
