"""``packtool plan --fit``: search for the fastest settings that fit into a GPU's memory.

The search covers the settings that the user has not set: packing length, recomputation of activations, sharding of
weights, gradients and optimizer, and the number of ranks that share a pack. Memory is confirmed by tracing.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import logging
import math
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from packtool.attention.parallel.axes import Axes
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import model_config
from packtool.cache.reader import exported_model
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, DataError, UnsupportedModelError
from packtool.launch.world import World
from packtool.planning.epoch import EpochPlan
from packtool.planning.towers import MediaShares
from packtool.progress import Progress
from packtool.simulate.hardware import read_hardware
from packtool.simulate.machine import Constants
from packtool.train.model.load import model_without_weights, resolve_dtype
from packtool.train.model.memory import CachedTracer, MemoryEstimate, PassTracer, estimate_memory, parameter_sizes
from packtool.train.model.precision import bytes_saved_by_quantization, quantized_layers
from packtool.train.model.recompute import LayerPlan, no_bytes, plan_recomputation, with_all_layers
from packtool.train.prepare.checkpoint import BatchShape
from packtool.train.prepare.costs import ExpectedTime
from packtool.train.prepare.figures import (
    RankTokens,
    assign_media,
    media_added,
    media_of_caches,
    peak_memory_batches,
    tokens_per_micro_batch,
)
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.parallelism import axes_of
from packtool.train.prepare.result import option_words

MAX_PROPOSALS = 12
_LENGTH_MULTIPLE = 128
_MAX_PACKING_LENGTH = 1 << 20
"""Largest packing length that is tried, in tokens, unless a sample is longer."""
_TIME_PRECISION = 0.01
"""Times that differ by less than this share count as equal, because the estimate is not more accurate."""
_GIB = 2**30
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings of a run with their expected time and memory.

    Args:
        micro_batches: those of a rank that may need most memory.
        fill: share of the packs' capacity that samples fill.
        num_steps, tokens, seconds: of an epoch; a prefix counts for each of its samples.
        token_share_saved: share of ``tokens`` that shared prefixes save, 0 to 1.
        gathering_share: share of the time in which keys and values of shared prefixes are gathered, 0 to 1.
        recomputation: figures of the planned layers; None without ``--gradient-checkpointing auto``.
        memory: of a rank; None before it is traced.
    """

    run: TrainConfig
    micro_batches: tuple[RankTokens, ...]
    axes: Axes
    fill: float
    num_steps: int
    tokens: int
    seconds: float
    token_share_saved: float
    gathering_share: float
    recomputation: dict[str, Any] | None = None
    memory: MemoryEstimate | None = None

    @property
    def seconds_per_token(self) -> float:
        """Seconds of an epoch divided by its tokens."""
        return self.seconds / self.tokens

    @property
    def lacks_layer_plan(self) -> bool:
        """True if the layers that recompute must still be planned."""
        return self.run.plans_recomputation and self.recomputation is None

    @property
    def sharding(self) -> str:
        """Name of the sharding of weights, gradients and optimizer."""
        return " ".join(("fsdp", *self.run.fsdp)) if self.run.fsdp else self.run.deepspeed or "none"

    def figures(self, world_size: int, gpus_per_node: int) -> dict[str, Any]:
        """Return settings and estimates of a run that fits, by their names in JSON."""
        assert self.memory is not None
        return {
            "packing_length": self.run.packing_length,
            "gradient_checkpointing": self.run.gradient_checkpointing,
            "recomputation": self.recomputation,
            "sharding": self.sharding,
            "sequence_parallel_size": self.run.sequence_parallel_ranks,
            "fill": self.fill,
            "steps_per_epoch": self.num_steps,
            "tokens_per_step": self.tokens / self.num_steps,
            "step_seconds": self.seconds / self.num_steps,
            "tokens_per_second": self.tokens / self.seconds,
            "token_share_saved": self.token_share_saved,
            "gathering_share": self.gathering_share,
            "hours": self.seconds * self.run.num_train_epochs / 3600,
            "memory_gib": self.memory.total,
            "command": self.command(world_size, gpus_per_node),
        }

    def command(self, world_size: int, gpus_per_node: int) -> str:
        """Return the command that trains with these settings."""
        bare = dataclasses.replace(self.run, output_dir="output", hardware=None, dry_run=False)
        words = shlex.join(["packtool", "train", *option_words(bare)])
        nodes = -(-world_size // gpus_per_node)
        if nodes > 1:
            return f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR=10.0.0.1 NPROC_PER_NODE={world_size // nodes} {words}"
        return f"NPROC_PER_NODE={world_size} {words}" if world_size > 1 else words


def find_fit(config: PlanConfig, progress: Progress) -> Fit:
    """Search for the fastest training settings whose peak memory fits into a GPU of ``--fit`` bytes.

    Settings that the user has set stay as they are. First estimate the time of each combination of the other settings,
    then trace the memory of the fastest ones, until ``MAX_PROPOSALS`` fit. Raise a ConfigError if none do.
    """
    search = Fit(config)
    runs = search.accepted_runs()
    search.num_settings = len(runs)

    progress.start("estimating times", len(runs))
    candidates = []
    for run in runs:
        candidates.append(search.estimate_time(run))
        progress.advance(1)
    progress.finish()

    progress.start("tracing memory, fastest settings first", None)
    _trace_fastest(search, candidates, progress)
    progress.finish()
    if not search.proposals:
        raise _no_fit_error(search, candidates)
    return search


def _trace_fastest(search: Fit, candidates: list[Proposal], progress: Progress) -> None:
    """Add the fastest candidates that fit to the proposals of a search, up to ``MAX_PROPOSALS``."""
    remaining = candidates
    while remaining and len(search.proposals) < MAX_PROPOSALS:
        candidate, *remaining = fastest_first(remaining)
        if candidate.lacks_layer_plan:
            # Planning adds the time of recomputation, so another candidate may be the fastest afterwards.
            remaining += search.with_planned_layers(candidate)
            continue
        search.num_tried += 1
        progress.advance(1)
        if candidate.recomputation is not None:  # planned for the budget, so it fits
            search.proposals.append(candidate)
        elif search.fits(candidate):
            search.proposals.append(dataclasses.replace(candidate, memory=search.memory(candidate)))


class _Planned(NamedTuple):
    """The plan of an epoch, and what it was made of."""

    plan: EpochPlan
    inputs: Inputs
    media_shares: MediaShares


class Fit:
    """Search for settings of a model on caches; caches plans and traces.

    Attributes:
        base: settings of all runs, some of which each run replaces.
        proposals: settings that fit, the fastest first.
        num_settings: number of settings that training accepts.
        num_tried: number of these whose memory was compared with the budget.
    """

    def __init__(self, config: PlanConfig) -> None:
        """Open the caches and read the model's configuration; plan and trace nothing yet."""
        self.config = config
        self.hardware = read_hardware(config.hardware)
        model_name = config.model or exported_model(config.cached_dataset[0])
        self.base = part_of(TrainConfig, config, model=model_name)
        self.inputs = open_to_train(self.base)
        self.files = self.inputs.for_training.files
        self.reader = self.inputs.for_training.reader

        self.proposals: list[Proposal] = []
        self.num_settings = 0
        self.num_tried = 0

        self._model_config = model_config(self.files.directory)
        refuse_unsupported(self._model_config)
        self._media = media_of_caches(self.reader.index, self.files.config)

        # Cached, because many runs have the same packs, plan, sequence parallelism, model or traced passes.
        self._first_plans: dict[tuple[int, bool], tuple[Inputs, EpochPlan]] = {}  # by the key of ``_make_plan``
        self._plan = cache(self._make_plan)
        self._axes = cache(self._make_axes)
        self._model = cache(self._make_model)
        self._tracer = CachedTracer()
        self._memory: dict[str, MemoryEstimate] = {}  # by ``repr`` of a proposal's run

    @property
    def budget(self) -> float:
        """Bytes of a GPU that a run may use."""
        assert self.config.fit is not None, "the command has --fit"
        return self.config.fit * Constants().usable_memory  # ``--fit`` is in bytes

    def figures(self) -> dict[str, Any]:
        """Return the result by its names in JSON."""
        return {
            "fit": self.config.fit,
            "budget_gib": self.budget / _GIB,
            "hardware": self.hardware.name,
            "num_settings": self.num_settings,
            "num_tried": self.num_tried,
            "num_too_large": self.num_tried - len(self.proposals),
            "proposals": [each.figures(self.config.world_size, self.hardware.gpus_per_node) for each in self.proposals],
            "recomputation": self.proposals[0].recomputation,
        }

    def with_planned_layers(self, proposal: Proposal) -> list[Proposal]:
        """Plan which layers recompute their activations so that a proposal fits into GPU memory.

        The proposal has ``--gradient-checkpointing auto``: only as many layers recompute as the memory requires.

        Returns:
            At most one proposal:
            - none, if the same settings fit without recomputation;
            - recomputation in all layers, if no plan is possible within the memory. Its memory is not estimated yet;
            - otherwise the planned layers, with time and memory.
        """
        run = proposal.run
        if self._fits_without_recomputation(run):
            return []

        layer_plan = self._plan_layers(proposal)
        tokens_by_kind = self._tokens_per_micro_batch(run)  # of text, images, ..., an array for all micro-batches each
        if layer_plan is None or layer_plan.exceeds(**tokens_by_kind).any():
            run_with_all_layers = dataclasses.replace(run, gradient_checkpointing=True, memory_budget=None)
            return [self.estimate_time(run_with_all_layers)]

        plan_figures = layer_plan.figures(**tokens_by_kind)
        memory_without_pass = self._estimate(proposal, no_bytes)
        activation_gib = plan_figures["peak_gib"] - memory_without_pass.fixed
        memory = dataclasses.replace(memory_without_pass, activations=activation_gib)
        timed_proposal = self.estimate_time(run, layer_plan)
        return [dataclasses.replace(timed_proposal, recomputation=plan_figures, memory=memory)]

    def _fits_without_recomputation(self, run: TrainConfig) -> bool:
        """Return whether the proposals, which fit, include this run without recomputation."""
        without_recomputation = dataclasses.replace(run, gradient_checkpointing=False, memory_budget=None)
        return any(proposal.run == without_recomputation for proposal in self.proposals)

    def _tokens_per_micro_batch(self, run: TrainConfig) -> dict[str, Any]:
        """Return the tokens of each of the C micro-batches of an epoch: an array (C,) by kind of token."""
        planned = self._plan_of(run)
        return tokens_per_micro_batch(planned.plan, planned.inputs)

    def _plan_layers(self, proposal: Proposal) -> LayerPlan | None:
        """Plan which layers of a proposal's run recompute their activations, within the memory of a GPU.

        Return None if the layers cannot be planned, or if the run does not fit even if all recompute.
        """
        run = proposal.run
        run_with_all_layers = dataclasses.replace(proposal, run=with_all_layers(run, recompute=True))
        if self.min_bytes(run_with_all_layers) >= self.budget:
            return None
        try:
            return plan_recomputation(
                run,
                proposal.axes,
                proposal.micro_batches,
                self._model_config,
                dtype=resolve_dtype(self._model_config, run, on_gpu=True),
                world_size=self.config.world_size,
                budget=run.memory_budget,  # of the complete GPU, unlike ``self.budget``
                trace=self._tracer.all_bytes,
            )
        except UnsupportedModelError as error:
            _LOG.debug("layers cannot be planned: %s", error)
            return None

    def accepted_runs(self) -> list[TrainConfig]:
        """Return a run for each acceptable combination of the settings that the user left open; raise without one."""
        requested = self.config.gradient_checkpointing
        checkpointing_choices: list[Any] = [False, "auto"] if requested is None else [requested]
        sizes = self._sequence_parallel_sizes()
        runs = []
        for size, sharding, checkpointing in itertools.product(sizes, self._shardings(), checkpointing_choices):
            settings = {"sequence_parallel_size": size, "gradient_checkpointing": checkpointing, **sharding}
            if checkpointing == "auto":
                settings["memory_budget"] = self.base.memory_budget or self.config.fit
            for packing_length in self._packing_lengths(size or 1):
                runs.append(dataclasses.replace(self.base, packing_length=packing_length, **settings))
        accepted = [run for run in runs if not run.problems()]
        if not accepted:
            problems = [problem for run in runs for problem in run.problems()]
            raise ConfigError.from_problems(list(dict.fromkeys(problems)))  # without repetitions
        return accepted

    def _shardings(self) -> list[dict[str, Any]]:
        """Return the settings of no sharding, and of the shardings to try; those that need less memory come later."""
        shardings: list[dict[str, Any]] = [{}]
        if self.config.world_size > 1 and not self.config.fsdp and self.config.deepspeed is None:
            shardings += [{"fsdp": ("full_shard",)}, {"fsdp": ("shard_grad_op",)}]
            if importlib.util.find_spec("deepspeed") is not None:
                shardings += [{"deepspeed": f"zero{stage}"} for stage in (1, 2, 3)]
        return shardings

    def estimate_time(self, run: TrainConfig, layer_plan: LayerPlan | None = None) -> Proposal:
        """Return a proposal: the settings of a run with the estimated time of an epoch, without memory.

        ``layer_plan`` says how many layers recompute in each micro-batch. Without it, the settings do; settings with
        ``--gradient-checkpointing auto`` then count as if no layer recomputed.
        """
        plan, inputs, media_shares = self._plan_of(run)
        sample_tokens = int(plan.packs.full_lengths.sum(dtype=np.int64))  # each sample with its shared prefix
        packed_tokens = plan.packs.num_tokens  # each shared prefix once

        time_model = self._expected_time(run)
        recomputed_share = self._recomputed_share(run, layer_plan)
        step_seconds = time_model.step_seconds(
            run, plan, self.reader.index, media_shares, inputs.shared, recomputed_share
        )  # (num_steps,)
        epoch_seconds = float(step_seconds.sum())
        gathering_seconds = float(time_model.gathering_seconds(run, plan).sum())  # of all ranks
        return Proposal(
            run=run,
            micro_batches=peak_memory_batches(run, plan, inputs, media_shares),
            axes=self._axes(run.sequence_parallel_ranks),
            fill=plan.summary.fill,
            num_steps=plan.steps.num_steps,
            tokens=sample_tokens,
            seconds=epoch_seconds,
            token_share_saved=1 - packed_tokens / sample_tokens,
            gathering_share=gathering_seconds / (epoch_seconds * plan.steps.world_size),
        )

    def _recomputed_share(self, run: TrainConfig, layer_plan: LayerPlan | None) -> Any:
        """Return the share of layers that recompute, of each micro-batch, (C,), or of all; None: as in the settings."""
        if layer_plan is not None:
            return layer_plan.shares(**self._tokens_per_micro_batch(run))
        return 0.0 if run.plans_recomputation else None

    def _expected_time(self, run: TrainConfig) -> ExpectedTime:
        """Return the estimator of a run's step times, from the bytes that the weights of the model have.

        GPUs exchange the gradients of trained weights, in a precision that depends on how gradients are sharded.
        """
        model = self._model(has_deepspeed=run.deepspeed is not None)
        parameters = parameter_sizes(model)
        trained = [parameter for parameter in parameters if parameter.is_trained]
        num_weights = sum(parameter.num_elements for parameter in parameters)
        num_trained = sum(parameter.num_elements for parameter in trained)
        bytes_per_weight = resolve_dtype(self._model_config, run, on_gpu=True).itemsize

        quantized = quantized_layers(model, self._model_config.model_type, run)
        saved_bytes = bytes_saved_by_quantization(quantized, run, bytes_per_weight)

        if run.fsdp:  # exchanges gradients in float32
            gradient_bytes = num_trained * torch.float32.itemsize
        elif run.deepspeed:  # in the precision of the computation
            gradient_bytes = num_trained * bytes_per_weight
        else:  # DDP: in the precision of the weights
            gradient_bytes = sum(parameter.num_bytes for parameter in trained)
        return ExpectedTime(
            model=self.files.config,
            hardware=self.hardware,
            world_size=self.config.world_size,
            weight_bytes=num_weights * bytes_per_weight - saved_bytes,
            gradient_bytes=gradient_bytes,
            trained_bytes=num_trained * bytes_per_weight,
        )

    def memory(self, proposal: Proposal) -> MemoryEstimate:
        """Return a rank's memory as ``packtool train --dry-run`` does; raise if the model cannot be traced."""
        key = repr(proposal.run)
        if key not in self._memory:
            self._memory[key] = self._estimate(proposal, self._tracer)
        estimate = self._memory[key]
        if estimate.activations is None:
            raise UnsupportedModelError(
                f"--fit: the memory of a {self._model_config.model_type} model cannot be estimated",
                "Leave out --fit; packtool train --dry-run shows the memory of its weights and optimizer.",
            )
        return estimate

    def min_bytes(self, proposal: Proposal) -> float:
        """Return a lower bound of a rank's bytes, from the passes traced so far; traces nothing itself."""
        return self._estimate(proposal, self._tracer.lower_bound).total * _GIB

    def num_bytes(self, proposal: Proposal) -> float:
        """Return a rank's estimated bytes; traces a pass unless that is done already."""
        return self.memory(proposal).total * _GIB

    def fits(self, proposal: Proposal) -> bool:
        """Return whether a rank's memory is within the budget; traces it only if the lower bound is."""
        return self.min_bytes(proposal) <= self.budget and self.num_bytes(proposal) <= self.budget

    def _estimate(self, proposal: Proposal, tracer: PassTracer) -> MemoryEstimate:
        """Estimate the memory of a rank, with the bytes of passes from a tracer."""
        run = proposal.run
        return estimate_memory(
            run,
            self._model(has_deepspeed=run.deepspeed is not None),
            self._model_config,
            dtype=resolve_dtype(self._model_config, run, on_gpu=True),
            world_size=self.config.world_size,
            micro_batches=proposal.micro_batches,
            axes=proposal.axes,
            trace=tracer,
        )

    def _plan_of(self, run: TrainConfig) -> _Planned:
        assert run.packing_length is not None, "every proposal has one"
        return self._plan(run.packing_length, run.sequence_parallel_ranks)

    def _make_plan(self, packing_length: int, size: int) -> _Planned:
        """Plan the first epoch as training does, and assign its media to the ``size`` ranks that share a pack."""
        shape = BatchShape.of(self.base, self.config.world_size // size)
        # Packs are the same for all sizes above 1. For 1 they may differ: with sequence parallelism, models with
        # sliding windows share no prefixes.
        key = packing_length, size > 1
        if key in self._first_plans:
            inputs, first_plan = self._first_plans[key]
            plan = inputs.assign(first_plan.packs, shape)
        else:
            config = dataclasses.replace(self.base, packing_length=packing_length, sequence_parallel_size=size)
            options = dataclasses.replace(self.inputs.options, packing_length=packing_length)
            inputs = dataclasses.replace(self.inputs, config=config, options=options).prepared()
            plan = inputs.plan_of(0, shape)
            self._first_plans[key] = inputs, plan
        media = media_added(self._media, inputs, plan)
        return _Planned(plan, inputs, assign_media(media, self.files.config, plan, size))

    def _make_model(self, *, has_deepspeed: bool) -> nn.Module:
        """Return the model without weights, in the precisions of a run, which depend on DeepSpeed."""
        run = dataclasses.replace(self.base, deepspeed="zero2" if has_deepspeed else None)
        return model_without_weights(run, self._model_config, resolve_dtype(self._model_config, run, on_gpu=True))

    def _make_axes(self, size: int) -> Axes:
        """Decide how ``size`` ranks share a sequence; raise if the model does not support it."""
        run = dataclasses.replace(self.base, sequence_parallel_size=size)
        world = World(size=self.config.world_size, sequence_parallel_size=size)
        return axes_of(run, world, self.files, self.reader.index.length, trained=True)

    def _sequence_parallel_sizes(self) -> list[int | None]:
        """Return the user's size, or None (no sharing) and all powers of two that the model and a machine allow."""
        config = self.config
        if config.sequence_parallel_size or config.ulysses_size or config.ring_size:
            self._axes(config.sequence_parallel_ranks)
            return [config.sequence_parallel_size]
        sizes: list[int | None] = [None]
        size = 2
        while config.world_size % size == 0 and size <= self.hardware.gpus_per_node:
            try:
                self._axes(size)
            except (ConfigError, UnsupportedModelError):
                break
            sizes.append(size)
            size *= 2
        return sizes

    def _packing_lengths(self, sequence_parallel_size: int) -> list[int]:
        """Return the longest sample's length, and larger powers of two with which an epoch still fills a step."""
        config, lengths, max_tokens = self.config, self.reader.index.length, self.inputs.options.max_length
        if config.packing_length is not None:
            return [config.packing_length]
        trained_lengths = lengths[lengths <= max_tokens]
        if not len(trained_lengths):
            problem = f"No samples to train on: none of {len(lengths):,} has at most {max_tokens:,} tokens."
            raise DataError(problem, "Raise --max-length.")
        min_length = -(-int(trained_lengths.max()) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE  # rounded up
        num_ranks = config.world_size // sequence_parallel_size
        packs_per_step = math.prod(BatchShape.of(config, num_ranks))
        max_length = min(int(trained_lengths.sum()) // packs_per_step, _MAX_PACKING_LENGTH)
        powers = [1 << exponent for exponent in range(8, 21)]
        return [min_length, *(length for length in powers if min_length < length <= max_length)]


def fastest_first(proposals: list[Proposal]) -> list[Proposal]:
    """Sort by time per token; if that is about equal, by tokens per step, ranks per sequence, and sharding."""
    fastest = min((each.seconds_per_token for each in proposals), default=0.0)

    def key(each: Proposal) -> tuple[float, ...]:
        time = (each.seconds_per_token / fastest - 1) // _TIME_PRECISION
        sharding = each.run.fsdp != (), each.run.deepspeed is not None
        return time, each.tokens / each.num_steps, each.run.sequence_parallel_ranks, *sharding

    return sorted(proposals, key=key)


def _no_fit_error(fit: Fit, candidates: list[Proposal]) -> ConfigError:
    """Return the error that names the settings that need the least memory, and remedies."""
    nearest = _nearest_fit(fit, candidates)
    run = nearest.run
    num_bytes = fit.num_bytes(nearest)
    checkpointing = str(run.gradient_checkpointing).lower()
    settings = f"--packing-length {run.packing_length}, --gradient-checkpointing {checkpointing}"
    settings += f", sharding {nearest.sharding}, --sequence-parallel-size {run.sequence_parallel_ranks}"
    return ConfigError(
        f"--fit: no settings fit into {fit.budget / _GIB:.1f} GiB ({Constants().usable_memory:.0%} of a GPU; libraries "
        f"and the allocator need the rest). The nearest settings, {settings}, need {num_bytes / _GIB:.1f} GiB, "
        f"{(num_bytes - fit.budget) / _GIB:.1f} too many ({fit.memory(nearest).sentence()}).",
        f"Try {'; or '.join(_ways_to_fit(fit.config))}.",
    )


def _ways_to_fit(config: PlanConfig) -> list[str]:
    """Return what a user can change to need less memory."""
    ways = ["more GPUs (--world-size)"]
    if config.train_type == "full":
        ways.append("adapters (--train-type lora)")
    ways.append("shorter samples (--max-length)")
    if not config.fsdp:
        ways.append("--fsdp full_shard offload, which keeps weights in the machine's memory")
    return ways


def _nearest_fit(fit: Fit, candidates: list[Proposal]) -> Proposal:
    """Return the settings that need the least memory."""
    by_min_bytes = sorted(candidates, key=fit.min_bytes)
    nearest = by_min_bytes[0]  # the settings with the smallest estimate so far
    for candidate in by_min_bytes:
        # Tracing takes seconds, and is useless if even the lower bound is above the smallest estimate.
        if fit.min_bytes(candidate) < fit.num_bytes(nearest):
            nearest = min(nearest, candidate, key=fit.num_bytes)
    return nearest
