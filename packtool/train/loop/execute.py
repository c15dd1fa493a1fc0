"""A prepared run, carried out.

Every rank has planned for itself: one exchange proves that all came to the same.

Samples that ``--on-bad-media skip`` left out of a run: counted, shown at its end, and listed in a file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainingArguments, set_seed

from packtool.attention.choose import choose, choose_elsewhere
from packtool.attention.parallel.blocks import choose_blocks
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.support import refuse_unsupported
from packtool.batch.batch import SkippedSample
from packtool.batch.dataset import deaths_told, is_bad
from packtool.batch.media_cache import MediaReads
from packtool.batch.spec import InputSpec
from packtool.cache.lock import DirectoryLock
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import place_of
from packtool.errors import ConfigError, MismatchError, raise_together
from packtool.launch.world import World, all_gather_objects
from packtool.plan.mixture import share_figures
from packtool.progress import Progress
from packtool.train.evaluate.per_sample import evaluate_in_training
from packtool.train.loop.arguments import check_optimizer_of, training_arguments
from packtool.train.loop.callbacks import (
    CheckpointCallback,
    EvaluationCallback,
    RecordCallback,
    ReportCallback,
    StepsCallback,
    ends_epoch,
)
from packtool.train.loop.loader import StepLoader, input_spec
from packtool.train.loop.trainer import PackTrainer
from packtool.train.loop.watch import StepWatch, StopSignals, name_samples
from packtool.train.model.adapters import take_adapter
from packtool.train.model.compiled import check_backend, compile_layers, refuse_without_liger
from packtool.train.model.load import has_gpu, load_model, make_trainable, quiet_transformers, resolve_dtype
from packtool.train.model.memory import FEW, MemoryEstimate, estimate_memory, model_without_weights
from packtool.train.model.precision import SavedPrecision, checkpoint_dtype, load_masters, loaded_dtype, precision_lines
from packtool.train.model.quantize import count_parameters, quantization_line, quantization_of
from packtool.train.model.router import RouterBalance
from packtool.train.model.sharding import (
    expert_sharding,
    is_zero3,
    keep_digits_of_outputs,
    meet_on_cpus,
    refuse_other_experts,
    shard_layers_that_are_there,
    shard_on_cpus,
)
from packtool.train.model.towers import PartRates
from packtool.train.model.unloaded import unloaded_line, unloaded_tensors
from packtool.train.prepare.checkpoint import PREFIX, RunState
from packtool.train.prepare.place import make_place
from packtool.train.prepare.prepared import PreparedRun, Validation
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.workers import workers_of
from packtool.train.verify.run import fewer_tokens, raise_if_failed, verify_cheaply


def check_ranks_agree(state: RunState, world: World, sequence_parallel: str = "") -> None:
    """Compare what all ranks have planned, by one exchange of hashes.

    The process group must be there.

    Args:
        sequence_parallel: how ranks share sequences, in words; each has worked it out, too.

    Raises:
        MismatchError: on every rank, naming what differs.
    """
    planned: dict[str, Any] = dataclasses.asdict(state) | {"sequence parallel": sequence_parallel}
    first, *_ = found = all_gather_objects(planned, world.size)
    for rank, other in enumerate(found):
        if other != first:
            differing = [name for name in first if other[name] != first[name]]
            lines = [f"  - {name}: {first[name]} on rank 0, {other[name]} there" for name in differing]
            raise MismatchError(
                f"rank {rank} would train something else than rank 0:\n" + "\n".join(lines),
                "All machines must see the same caches, the same options and the same version of packtool.",
            )


SKIPPED_NAME = "skipped.jsonl"
_MOST_SHOWN = 20


def all_skipped(mine: Sequence[SkippedSample], world: World) -> list[SkippedSample]:
    """Those of all ranks; every rank must call this."""
    return [sample for each in all_gather_objects(list(mine), world.size) for sample in each]


def skipped_lines(skipped: Sequence[SkippedSample]) -> Iterator[str]:
    """What is to be said of them at the end of a run."""
    if not skipped:
        return
    yield f"samples left out because their media could not be loaded: {len(skipped):,} (all in {SKIPPED_NAME})"
    for sample in skipped[:_MOST_SHOWN]:
        yield f"  row {sample.row} of {sample.source}: {sample.message}"
    if len(skipped) > _MOST_SHOWN:
        yield f"  and {len(skipped) - _MOST_SHOWN:,} more"


def write_skipped(output_dir: str, skipped: Sequence[SkippedSample]) -> None:
    """A line for each, once for every epoch that it is missing in; no file if there are none."""
    path = os.path.join(output_dir, SKIPPED_NAME)
    if not skipped:
        if os.path.exists(path):
            os.remove(path)
        return
    with open(path, "w", encoding="utf-8") as file:
        for sample in skipped:
            file.write(json.dumps(dataclasses.asdict(sample), ensure_ascii=False) + "\n")


_MANY_STEPS = 1_000_000


def load_spec(run: PreparedRun) -> InputSpec:
    """The model as collation sees it.

    Raises:
        ConfigError: for a multimodal model of an unknown family, or --quant-bits without bitsandbytes.
        UnsupportedModelError: for a model whose packed samples could not be kept apart, or that Liger fails to patch.
    """
    spec = input_spec(run)
    raise_together(_model_checks(run.config, spec.config))
    return spec


def checks_without_rows(config: TrainConfig) -> list[Callable[[], object]]:
    """What training would refuse whatever its rows are: calls that raise, which read the model's configuration.

    Raises:
        ConfigError: for a model that cannot be trained at all, or a precision that this machine lacks.
    """
    model = InputSpec.load(place_of(config.model), MediaLimits()).config
    return [*_model_checks(config, model), partial(_check_trainable, config, model)]


def _model_checks(config: TrainConfig, model: PreTrainedConfig) -> list[Callable[[], object]]:
    dtype = resolve_dtype(model, config, on_gpu=has_gpu(config))
    checks: list[Callable[[], object]] = [partial(quantization_of, config, model, dtype)]
    if config.torch_compile and is_zero3(config):
        checks.append(partial(_refuse_compiled_zero3, config))
    if config.use_liger_kernel or config.shares_experts:
        checks.append(partial(_check_layers, config, model))
    if config.removes_padding:
        checks += [partial(refuse_unsupported, model), partial(_check_kernel, config, dtype)]
    return checks


def _refuse_compiled_zero3(config: TrainConfig) -> None:
    raise ConfigError(
        f"--torch-compile true: with --deepspeed {config.deepspeed} weights are gathered inside of the layers "
        "that would be compiled",
        "Shard weights with --fsdp full_shard, which gathers them around a layer, or leave out --torch-compile.",
    )


def _check_layers(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    with quiet_transformers():
        model = model_without_weights(config, model_config, torch.float32)
    refuse_other_experts(model, config)
    if config.use_liger_kernel:
        refuse_without_liger(model, model_config.model_type, on_gpu=has_gpu(config))


def _check_kernel(config: TrainConfig, dtype: torch.dtype) -> None:
    on_gpu = has_gpu(config)
    if on_gpu and not torch.cuda.is_available():
        choose_elsewhere(config.attn_impl, dtype)
        return
    device = torch.device("cuda" if on_gpu else "cpu")
    choose(config.attn_impl, device, dtype)
    if config.torch_compile:
        check_backend(config.torch_compile_backend, device)
    if config.sequence_parallel_ranks > 1:
        choose_blocks(config.attn_impl, device, dtype, head_dims=(0, 0))


def _check_trainable(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    num_steps = config.max_steps or _MANY_STEPS  # rows, which have not been counted, decide
    check_optimizer_of(*_trainable_without_weights(config, model_config, num_steps))


def _trainable_without_weights(
    config: TrainConfig, model_config: PreTrainedConfig, num_steps: int
) -> tuple[nn.Module, TrainingArguments]:
    """The model on the meta device, and what the Trainer is told, once all options of training are known to fit."""
    dtype = resolve_dtype(model_config, config, on_gpu=has_gpu(config))
    with quiet_transformers():
        args = training_arguments(config, num_steps=num_steps, dtype=dtype, on_gpu=torch.cuda.is_available())
        model = model_without_weights(config, model_config, dtype)
        PartRates.of(config, model)
        if config.router_aux_loss_coef:
            RouterBalance(model, config.router_aux_loss_coef)
    return model, args


def estimate_training(run: PreparedRun, spec: InputSpec) -> tuple[MemoryEstimate, list[str]]:
    """What training would need, without loading weights; everything that it would refuse is refused.

    Returns:
        the estimate, and what the run would say of its weights' precision.

    Raises:
        ConfigError, UnsupportedModelError: as training.
    """
    dtype = resolve_dtype(spec.config, run.config, on_gpu=has_gpu(run.config))
    model, args = _trainable_without_weights(run.config, spec.config, run.timeline.num_steps)
    estimate = _estimate(run, model, spec, dtype)
    told = list(precision_lines(model, dtype, run.config, checkpoint_dtype(spec.config)))
    told += quantization_line(model, spec.config.model_type, run.config)
    check_optimizer_of(model, args)
    return estimate, told


def _estimate(run: PreparedRun, model: nn.Module, spec: InputSpec, dtype: torch.dtype) -> MemoryEstimate:
    found = []
    for number, (config, axes) in enumerate(run.kinds_of_steps):
        heaviest, size = run.heaviest(number), run.world.size
        found.append(
            estimate_memory(config, model, spec.config, dtype=dtype, world_size=size, micro_batches=heaviest, axes=axes)
        )
    return max(found, key=lambda estimate: estimate.total or 0)


def _is_scarce_here() -> bool:
    """Whether memory is that of a GPU, which is told of at the start of a run."""
    return torch.cuda.is_available()


def execute(
    run: PreparedRun, spec: InputSpec, result: TrainResult, progress: Progress, lock: DirectoryLock | None
) -> TrainResult:
    """Load, train, save.

    Args:
        result: what was planned.
        lock: of the output directory; None on all ranks but the first.

    Returns:
        ``result`` with what came of it.
    """
    run = run.with_config(dataloader_num_workers=workers_of(run))
    with quiet_transformers():
        run, args = enter(run, spec, progress)
        training = make_training(run, args, spec, progress, lock)
        trainer, report, watch = training.trainer, training.report, training.watch
        assert trainer.model is not None
        num_trainable, num_parameters = count_parameters(trainer.model)
        progress.note(f"parameters: {num_parameters:,}, of them trained: {num_trainable:,} ({run.config.train_type})")
        # The others would trace the same; and the memory of a CPU is seldom what a run waits for.
        if run.world.is_first and _is_scarce_here():
            dtype = resolve_dtype(spec.config, run.config, on_gpu=True)
            progress.note(_estimate(run, trainer.model, spec, dtype).sentence())
        verify_packing(run, training, spec, progress)
        begin = time.perf_counter()
        with watch.signals, deaths_told():
            trainer.train(resume_from_checkpoint=run.resume_point.checkpoint)
        seconds = time.perf_counter() - begin
    steps = trainer.state.global_step
    result = trainer.loader.steps.counted(result)
    for line in training.early_lines(result.steps):
        progress.note(line)
    if spec.media_cache is not None:
        reads = sum(all_gather_objects(trainer.loader.media_reads, run.world.size), MediaReads())
        progress.note(reads.sentence(spec.media_cache))
    skipped = all_skipped(trainer.skipped, run.world)
    for line in skipped_lines(skipped):
        progress.note(line)
    result = dataclasses.replace(
        result,
        num_skipped=len(skipped),
        sources=share_figures(trainer.trained_sources),
        output_dir=run.config.output_dir,
        steps=steps,
        seconds=seconds,
        target_tokens_per_second=result.target_tokens / seconds,
        first_loss=report.first_loss,
        last_loss=report.last_loss,
        checkpoint=_last_checkpoint(run.config, trainer),
        num_trainable_parameters=num_trainable,
        num_parameters=num_parameters,
    )
    if run.world.is_first:
        result.write()
        write_skipped(run.config.output_dir, skipped)
    # No rank may end before all is written: a launcher ends the others when the first one ends.
    trainer.accelerator.wait_for_everyone()
    watch.raise_if_stopped(steps, run.timeline.num_steps, os.path.join(run.config.output_dir, f"{PREFIX}{steps}"))
    return result


def _last_checkpoint(config: TrainConfig, trainer: PackTrainer) -> str | None:
    """The checkpoint that a run ends with: its last, or its best where that is asked for."""
    if config.seeks_best and trainer.state.best_model_checkpoint is not None:
        return trainer.state.best_model_checkpoint
    if config.save_strategy in ("no", "best"):
        return None
    return os.path.join(config.output_dir, f"{PREFIX}{trainer.state.global_step}")


def verify_packing(run: PreparedRun, training: Training, spec: InputSpec, progress: Progress) -> None:
    """Look at a few samples of the first pack before the first step.

    Raises:
        MismatchError: if they do not compute in the pack what they compute alone.
    """
    config, on_gpu = run.config, torch.cuda.is_available()
    if not (config.removes_padding and config.verify_packing):
        return
    if is_zero3(config) or config.shares_experts or (on_gpu and (config.fsdp or config.deepspeed)):
        progress.note("packing is not verified before weights are sharded; packtool verify does it on one device")
        return
    dtype = resolve_dtype(spec.config, config, on_gpu=on_gpu)
    samples = run.first_samples(FEW)
    if config.on_bad_media == "skip":
        samples = [sample for sample in samples if not is_bad(sample, spec)]
    samples = fewer_tokens(samples)
    if len(samples) > 1:
        model = training.trainer.model
        assert model is not None
        parallel, least_shared = training.parallel, run.least_shared
        checks = verify_cheaply(model, samples, spec, dtype=dtype, parallel=parallel, least_shared=least_shared)
        raise_if_failed(checks, shares=least_shared is not None)


def enter(run: PreparedRun, spec: InputSpec, progress: Progress) -> tuple[PreparedRun, TrainingArguments]:
    """Start the process group, let the ranks compare what they will train, and clear the output directory.

    Returns:
        the run with the directory that all ranks write to.
    """
    on_gpu = torch.cuda.is_available()
    dtype = resolve_dtype(spec.config, run.config, on_gpu=on_gpu)
    args = training_arguments(run.config, num_steps=run.timeline.num_steps, dtype=dtype, on_gpu=on_gpu)
    check_ranks_agree(run.state, run.world, run.axes.name)
    config = make_place(run.config, run.world)
    if config.add_version:
        progress.note(f"this run is in {config.output_dir}")
    args.output_dir = config.output_dir
    return run.with_config(output_dir=config.output_dir), args


@dataclass(frozen=True)
class Training:
    """What trains on this rank.

    Args:
        trainer: transformers' Trainer, told what a step is.
        report: what it tells the user.
        watch: what ends it.
        parallel: ranks that share sequences with this one, as the model was told; None for nobody.
        evaluation: what evaluates between steps; None for nothing.
    """

    trainer: PackTrainer
    report: ReportCallback
    watch: StepWatch
    parallel: SequenceParallel | None
    evaluation: EvaluationCallback | None

    def early_lines(self, planned: int) -> Iterator[str]:
        """Why training ended before so many steps, if neither a signal nor a mistake ended it."""
        steps, config, state = self.trainer.state.global_step, self.trainer.loader.run.config, self.trainer.state
        if steps < planned and self.trainer.loader.steps.ended and not self.watch.stopped_by:
            yield f"the rows ended after step {steps:,} of {planned:,}; a larger --num-train-epochs reads them again"
        if self.evaluation is not None and self.evaluation.ended_early:
            told = f"ended early after step {steps:,} of {planned:,}: {config.best_metric} was best after step "
            told += f"{state.best_global_step or 0:,}"
            yield f"{told}, and not in the {config.early_stop_interval} evaluations since"


def make_training(
    run: PreparedRun, args: TrainingArguments, spec: InputSpec, progress: Progress, lock: DirectoryLock | None
) -> Training:
    """Load the model, and put together what trains it."""
    config, on_gpu = run.config, torch.cuda.is_available()
    dtype = resolve_dtype(spec.config, config, on_gpu=on_gpu)
    loader = StepLoader(run, spec)
    watch = StepWatch(
        StopSignals(launched=run.world.size > 1),
        lambda: partial(name_samples, loader.names(), run.world.rank),
        on_nan=config.on_nan,
        world=run.world,
        progress=progress,
    )
    report = ReportCallback(run, progress, loader)
    parallel = None
    if run.world.sequence_parallel_size > 1:
        device_type = "cuda" if on_gpu else "cpu"
        others = tuple(SequenceParallel.on_mesh(axes, device_type) for size, axes in run.ways.items() if size > 1)
        parallel = dataclasses.replace(SequenceParallel.on_mesh(run.axes, device_type), others=others)
    meet_on_cpus(config)
    model, saved, unloaded = _make_model(run, spec, dtype, parallel)
    if run.resume_point.weights is not None:
        progress.note(f"weights are those of {run.resume_point.weights}; optimizer, schedule and data begin anew")
    told = (*precision_lines(model, dtype, config, saved.dtype), *unloaded_line(unloaded, config.model))
    for line in (*told, *quantization_line(model, spec.config.model_type, config)):
        progress.note(line)
    if config.torch_compile:
        compile_layers(model, config.torch_compile_backend)
    shard_on_cpus(config)
    # In the order in which they must come; evaluation and the finishing of checkpoints come after them.
    saves_epochs = config.save_strategy == "epoch"
    callbacks = [StepsCallback(run.timeline, loader.steps, saves_epochs=saves_epochs), watch]
    trainer = PackTrainer(
        model,
        args,
        loader,
        [*callbacks, report] if run.world.is_first else callbacks,
        saved=saved,
        numbers=watch.numbers,
    )
    keep_digits_of_outputs(trainer.accelerator, config)
    shard_layers_that_are_there(trainer.accelerator, model, config)
    evaluation = None
    if run.validation is not None:
        every = config.eval_steps if config.eval_strategy == "steps" else None
        evaluate = partial(_evaluate, run, run.validation, trainer, parallel)
        ends = partial(ends_epoch, run.timeline)
        evaluation = EvaluationCallback(
            partial(trainer.log_evaluation, evaluate), ends if every is None else lambda step: step % every == 0, config
        )
        trainer.add_callback(evaluation)
        watch.is_evaluated = evaluation.is_due
    if (record := run.record()) is not None:
        trainer.add_callback(RecordCallback(record, trainer, watch))
    trainer.add_callback(CheckpointCallback(run, watch, lock, unloaded))
    return Training(trainer, report, watch, parallel, evaluation)


def _evaluate(
    run: PreparedRun, validation: Validation, trainer: PackTrainer, parallel: SequenceParallel | None
) -> dict[str, float]:
    """The val split, between two steps."""
    return evaluate_in_training(
        trainer.model_wrapped,
        validation.reader,
        trainer.loader.spec,
        validation.plan,
        world=run.world,
        num_workers=workers_of(run),
        samples=validation.samples,
        parallel=parallel,
    )


def _make_model(
    run: PreparedRun, spec: InputSpec, dtype: torch.dtype, parallel: SequenceParallel | None
) -> tuple[PreTrainedModel | PeftModel, SavedPrecision, dict[str, str]]:
    """The model, how it is saved, and the base model's tensors that a saved model takes over, with their files."""
    # Adapters are drawn at random: alike on every rank, and in every run with this seed.
    set_seed(run.config.seed)
    weights = run.resume_point.weights
    computed_in, is_adapter = dtype, run.config.train_type == "lora"
    dtype = loaded_dtype(dtype, spec.config, run.config)
    experts = None
    if run.config.shares_experts:
        shape = model_without_weights(run.config, spec.config, dtype)
        experts = expert_sharding(shape, run.config, run.world, computed_in)
    model = load_model(
        # Which an adapter names as its base.
        weights if weights is not None and not is_adapter else place_of(run.config.model),
        spec.config,
        dtype=dtype,
        packing=run.config.removes_padding,
        attn_impl=run.config.attn_impl,
        parallel=parallel,
        quantization=run.config,
        experts=experts,
    )
    saved = SavedPrecision.of(spec.config, model)
    unloaded = {} if is_adapter else unloaded_tensors(model, run.files.directory)
    trained = make_trainable(model, run.config)
    if weights is not None and isinstance(trained, PeftModel):
        take_adapter(trained, weights)
    elif weights is not None:
        load_masters(trained, weights)
    return trained, saved, unloaded
