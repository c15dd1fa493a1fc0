"""``packtool verify``: checks that the user's model gives the same outputs for packed and unpacked samples."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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
from packtool.encode.encoded import EncodedSample
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, DataError
from packtool.launch.world import World
from packtool.planning.pack_plan import Int64Array, PackPlan
from packtool.planning.packing import pack, pack_trees
from packtool.planning.prefix_trees import PrefixTrees
from packtool.progress import Progress, SilentProgress
from packtool.train.model.load import load_model, quiet_transformers, resolve_dtype
from packtool.train.model.trainable import without_dropout
from packtool.train.prepare.caches import open_caches
from packtool.train.prepare.parallelism import axes_of
from packtool.train.prepare.shared_prefixes import find_shared_prefixes
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

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class VerifyReport:
    """Results of ``packtool verify``.

    Args:
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
    """Check that a model computes the same for samples in packs as for each sample alone.

    Failed checks are part of the report, and not raised. With sequence parallelism, ranks share each sequence, and all
    of them must call this. ``world``: the ranks; by default those that torchrun has started.
    """
    begin = time.perf_counter()
    progress = progress or SilentProgress()
    world = world or World.from_environment()
    world = world.shared_by(config.sequence_parallel_ranks)
    files = ModelFiles.load(config.model)
    reader = open_caches(config.cached_dataset, config, files)
    spec = InputSpec.load(files.directory, reader.manifests[0].identity.media_limits, config)
    refuse_unsupported(spec.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.trajectory is not None:
        packs, report_fields = _verify_trajectory(config, reader, spec, device, progress)
    else:
        packs, report_fields = _verify_packs(config, reader, spec, device, progress, files=files, world=world)

    positions = np.concatenate(packs)  # of all tested samples in the caches
    return VerifyReport(
        model=config.model,
        num_packs=len(packs),
        num_samples=len(positions),
        num_tokens=int(reader.index.length[positions].sum()),
        seconds=time.perf_counter() - begin,
        **report_fields,
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
    """Choose some packs, and compare logits, losses and gradients of their samples packed and alone.

    Returns the positions in the caches of the samples of each pack, and fields of ``VerifyReport``.
    """
    packs, min_shared = _plan_packs(config, reader, files, progress)
    dtype = resolve_dtype(spec.config, config, on_gpu=device.type == "cuda")
    attention = choose(config.attn_impl, device, dtype).name  # an error if no kernel can run
    samples_by_pack = _read_packs(reader, packs, spec, min_shared)
    parallel = None
    if world.sequence_parallel_size > 1:
        device, parallel, axes_name = _join_ranks(config, world, files, reader)
        attention = f"{_block_kernel(config, spec, device, dtype)} blocks, {axes_name}"

    tested_packs = []
    with quiet_transformers():
        model = _load_model(config, spec, dtype, device, parallel)
        for number, samples in enumerate(samples_by_pack):
            has_unsplit = number % 2 == 1  # with several ranks, test samples that one rank computes alone, too
            tested_packs.append(
                PackUnderTest(model, samples, spec, dtype, parallel, has_unsplit=has_unsplit, min_shared=min_shared)
            )
        checks = _run_checks(model, tested_packs, progress)

    report_fields = {
        "device": device.type if device.type == "cpu" else str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "attention": attention,
        "num_shared_tokens": sum(tested_pack.num_shared_tokens for tested_pack in tested_packs),
        "checks": checks,
    }
    return packs, report_fields


def _plan_packs(
    config: VerifyConfig, reader: CacheReader, files: ModelFiles, progress: Progress
) -> tuple[list[list[int]], int | None]:
    """Choose the packs to check; return the samples of each, and the least tokens of a prefix that they may share."""
    capacity = _max_pack_tokens(config, reader)
    shared, warning = find_shared_prefixes(config, files.config, reader, capacity=capacity, max_length=capacity)
    if warning is not None:
        progress.note(warning)
    if shared is None:
        return choose_packs(reader, config), None
    return choose_packs(reader, config, shared.trees), MIN_SHARED


def _read_packs(
    reader: CacheReader, packs: Sequence[Sequence[int]], spec: InputSpec, min_shared: int | None
) -> list[list[EncodedSample]]:
    """Read the samples of packs; raise an error if a pack has inputs through which its samples affect each other."""
    samples_by_pack = [[reader.sample(position) for position in positions] for positions in packs]
    for samples in samples_by_pack:
        batch = collate_packs(samples, spec) if min_shared is None else collate_tree(samples, spec)
        refuse_leaky_inputs(batch.model_inputs())
    return samples_by_pack


def _join_ranks(
    config: VerifyConfig, world: World, files: ModelFiles, reader: CacheReader
) -> tuple[torch.device, SequenceParallel, str]:
    """Start the process group; return this rank's own device, the ranks that share a sequence, and how they do."""
    device = PartialState(cpu=not torch.cuda.is_available(), **config.group_options).device
    axes = axes_of(config, world, files, reader.index.length)
    return device, SequenceParallel.on_mesh(axes, device.type), axes.name


def _load_model(
    config: VerifyConfig,
    spec: InputSpec,
    dtype: torch.dtype,
    device: torch.device,
    parallel: SequenceParallel | None,
) -> PreTrainedModel:
    """Load the model onto a device, with packed attention."""
    model: PreTrainedModel = load_model(config.model, spec.config, dtype=dtype, packing=False)
    model = model.to(device)  # type: ignore[arg-type]  # to is overloaded
    set_attention(model, config.attn_impl, parallel)
    return model


def _block_kernel(config: VerifyConfig, spec: InputSpec, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the kernel that computes blocks of sequences that are split over ranks."""
    text = spec.config.get_text_config()
    head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    return choose_blocks(config.attn_impl, device, dtype, head_dims=(head_dim, head_dim)).name


def _run_checks(model: PreTrainedModel, packs: Sequence[PackUnderTest], progress: Progress) -> tuple[Check, ...]:
    """Return the worst result of each check over all packs; ``check_prefixes`` runs only on shared prefixes."""
    functions = (check_isolation, check_prefixes, check_logits, check_loss, check_gradients)
    calls = []
    for tested_pack in packs:
        for function in functions:
            if function is not check_prefixes or tested_pack.is_tree:
                calls.append((function, tested_pack))
    checks: list[Check] = []
    progress.start("verify", len(calls))
    with without_dropout(model):
        for function, tested_pack in calls:
            checks.append(function(tested_pack))
            progress.advance(1)
    progress.finish()
    return tuple(worst_of(checks))


def _verify_trajectory(
    config: VerifyConfig, reader: CacheReader, spec: InputSpec, device: torch.device, progress: Progress
) -> tuple[Sequence[Sequence[int]], dict[str, Any]]:
    """Train a few optimizer steps twice, with packed samples and with each sample alone, and compare the results.

    Returns the positions in the caches of the samples of each pack, and fields of ``VerifyReport``.
    """
    steps = plan_steps(config, _max_pack_tokens(config, reader), reader)
    packs = [pack for step in steps for pack in step.packs]
    attention = choose(config.attn_impl, device, torch.float32).name

    def load_new_model() -> PreTrainedModel:
        """A model with the initial weights, for each of the two trainings."""
        model = load_model(config.model, spec.config, dtype=torch.float32, packing=True, attn_impl=config.attn_impl)
        return model.to(device)  # type: ignore[arg-type]  # to is overloaded

    with quiet_transformers():
        trained_steps, checks = compare_trajectories(load_new_model, steps, reader.sample, spec, progress)
    report_fields = {
        "device": str(device),
        "dtype": "float32",
        "attention": attention,
        "num_shared_tokens": 0,  # these packs share no prefixes
        "checks": checks,
        "trajectory": trained_steps,
    }
    return packs, report_fields


def _max_pack_tokens(config: VerifyConfig, reader: CacheReader) -> int:
    """Return ``--packing-length``, by default the caches' maximum length."""
    return config.packing_length or max(manifest.max_length for manifest in reader.manifests)


def choose_packs(reader: CacheReader, config: VerifyConfig, trees: PrefixTrees | None = None) -> list[list[int]]:
    """Pack the samples, and choose ``--num-packs`` packs of at least two samples to verify.

    ``trees`` are groups of samples that begin with the same tokens (prefixes); packs with such samples come first. If
    possible, the first pack also has images, videos or sounds.

    Returns the positions in the caches of the samples of each pack.
    """
    capacity = _max_pack_tokens(config, reader)
    plan = _pack_samples(reader, capacity, config.seed, trees)
    samples_per_pack = np.diff(plan.offsets)
    candidates = np.flatnonzero(samples_per_pack > 1)  # numbers of packs
    if len(candidates) == 0:
        raise ConfigError(
            f"--packing-length {capacity}: no two samples share a pack, so there is nothing to compare",
            "Raise it so that the two shortest samples fit into a pack.",
        )
    has_media = plan.sums_per_pack(reader.index.media_tokens[plan.samples]) > 0
    has_prefix = np.zeros(plan.num_packs, np.bool_)
    if plan.shared_tokens is not None:
        has_prefix = plan.sums_per_pack(plan.shared_tokens) > 0
    ordered_packs = _best_first(candidates, has_prefix[candidates], has_media[candidates])
    return [plan.pack(number).tolist() for number in ordered_packs[: config.num_packs]]


def _best_first(packs: Int64Array, has_prefix: BoolArray, has_media: BoolArray) -> list[int]:
    """Order packs: one with a prefix and media (else a prefix, else media, else any), then those with prefixes.

    All arrays are (K,). Within each kind, packs stay in the random order of the plan.
    """
    first = packs[np.argmax(2 * has_prefix + has_media)]
    ordered = [*packs[has_prefix], *packs[~has_prefix]]
    return [int(first), *(int(number) for number in ordered if number != first)]


def _pack_samples(reader: CacheReader, capacity: int, seed: int, trees: PrefixTrees | None) -> PackPlan:
    """Pack the samples of at most ``capacity`` tokens, or those of ``trees``; a DataError if there are none."""
    lengths = reader.index.length
    fitting = np.flatnonzero(lengths <= capacity)
    if not len(fitting):
        raise DataError(
            f"none of the {len(reader):,} samples fits into a pack of {capacity:,} tokens",
            f"Raise --packing-length; the shortest sample has {int(lengths.min(initial=0)):,} tokens.",
        )
    if trees is not None:
        return pack_trees(trees, lengths, capacity, seed=seed)
    plan = pack(lengths[fitting], capacity, seed=seed)
    return dataclasses.replace(plan, samples=fitting[plan.samples])  # from positions in ``fitting`` to those in caches
