"""``packtool eval``: checks that caches and model match, evaluates every sample, and writes the results to a file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packtool.cache.evaluation_file import write_evaluation
from packtool.config.commands import EvalConfig
from packtool.launch.processes import imported_at_once
from packtool.launch.world import World
from packtool.progress import Progress, SilentProgress
from packtool.rows.sample import RowPart
from packtool.train.prepare.evaluation import PreparedEvaluation, prepare_evaluation
from packtool.train.prepare.parallelism import sequence_parallel_lines

if TYPE_CHECKING:
    from packtool.attention.parallel.mesh import SequenceParallel
    from packtool.batch.spec import InputSpec
    from packtool.train.evaluate.per_sample import Evaluation


@dataclass(frozen=True, eq=False)
class EvalResult:
    """Result of an evaluation.

    Args:
        tokens: of all samples.
        num_micro_batches: over all ranks.
        seconds: of the forward passes, without loading the model.
        output: path of the written file.
    """

    evaluation: Evaluation
    split: str
    tokens: int
    num_micro_batches: int
    num_processes: int
    seconds: float
    output: str


def evaluate_caches(config: EvalConfig, progress: Progress, world: World | None = None) -> EvalResult:
    """Compute the loss and the accuracy of a model on each sample of caches, and write them to ``--output``.

    Every process of a torchrun job must call this; the first one writes the file. Errors in options, caches and paths
    are raised before the model is loaded, which takes long.

    Args:
        progress: used in the first process only.
        world: the processes; by default those that torchrun has started.
    """
    world = world or World.from_environment()
    world = world.shared_by(config.sequence_parallel_ranks)
    progress = progress if world.is_first else SilentProgress()
    prepared = prepare_evaluation(config, world)
    for line in _plan_lines(prepared):
        progress.note(line)
    evaluation, seconds = _load_and_evaluate(prepared, progress)
    if world.is_first:
        _write(evaluation, prepared)
    return EvalResult(
        evaluation=evaluation,
        split=prepared.reader.split,
        tokens=int(prepared.plan.lengths.sum()),
        num_micro_batches=len(prepared.plan.batches.micro_batch_sizes),
        num_processes=world.size,
        seconds=seconds,
        output=config.output,
    )


def _plan_lines(prepared: PreparedEvaluation) -> Iterator[str]:
    """Describe the samples and the micro-batches of an evaluation."""
    plan, reader, world = prepared.plan, prepared.reader, prepared.world
    num_tokens = int(plan.lengths.sum())
    yield f"{reader.split} split: {len(plan.lengths):,} of {len(reader):,} samples, {num_tokens:,} tokens"
    num_micro_batches = len(plan.batches.micro_batch_sizes)
    processes = f"{world.size} process{'es' if world.size > 1 else ''}"
    yield f"micro-batches: {num_micro_batches:,} of at most {plan.max_tokens:,} tokens, {processes}"
    yield from sequence_parallel_lines(world, prepared.axes)
    yield from prepared.notes


def _load_and_evaluate(prepared: PreparedEvaluation, progress: Progress) -> tuple[Evaluation, float]:
    """Load the model and evaluate it; return the result, and the seconds of the evaluation without loading."""
    # Imported late, so that mistakes in options are reported before the seconds that torch and transformers take.
    with imported_at_once():
        from packtool.batch.spec import InputSpec
        from packtool.train.evaluate.per_sample import evaluate
        from packtool.train.model.load import quiet_transformers

    config, reader = prepared.config, prepared.reader
    media_limits = reader.manifests[0].identity.media_limits
    spec = InputSpec.load(prepared.trained.base, media_limits, config)
    spec = spec.with_media_cache(config, reader.fingerprint)
    model, parallel = _load_model(prepared, spec)
    with quiet_transformers():
        begin = time.perf_counter()
        evaluation = evaluate(
            model,
            reader,
            spec,
            prepared.plan,
            world=prepared.world,
            progress=progress,
            num_workers=config.dataloader_num_workers,
            parallel=parallel,
        )
        seconds = time.perf_counter() - begin
    return evaluation, seconds


def _load_model(prepared: PreparedEvaluation, spec: InputSpec) -> tuple[Any, SequenceParallel | None]:
    """Load the model onto the device of this rank, and start the process group.

    Returns the model, with packed attention if it supports that; and the group of ranks that share its sequences, None
    if each rank has its own.
    """
    import torch
    from accelerate import PartialState

    from packtool.attention.choose import choose
    from packtool.attention.parallel.blocks import choose_blocks
    from packtool.attention.parallel.mesh import SequenceParallel
    from packtool.train.evaluate.per_sample import can_be_packed
    from packtool.train.model.load import load_trained, quiet_transformers, resolve_dtype

    config, trained = prepared.config, prepared.trained
    on_gpu = torch.cuda.is_available()
    dtype = resolve_dtype(spec.config, config, on_gpu=on_gpu)
    packing = can_be_packed(spec.config)
    if packing:
        choose(config.attn_impl, torch.device("cuda" if on_gpu else "cpu"), dtype)  # raises if no kernel can run
    device = PartialState(cpu=not on_gpu, **config.group_options).device  # starts the process group

    parallel = None
    if prepared.world.sequence_parallel_size > 1:
        choose_blocks(config.attn_impl, device, dtype, head_dims=(0, 0))  # raises, too; for heads of any size
        parallel = SequenceParallel.on_mesh(prepared.axes, device.type)
    with quiet_transformers():
        model = load_trained(
            trained, spec, dtype, packing=packing, attn_impl=config.attn_impl, parallel=parallel, quantization=config
        )
        if config.quant_bits is None:  # transformers places quantized models itself
            model = model.to(device)
    return model, parallel


def _write(evaluation: Evaluation, prepared: PreparedEvaluation) -> None:
    """Write a row for each sample, and the totals as metadata."""
    reader, config = prepared.reader, prepared.config
    # The total of samples without a channel, named None, is left out.
    channels = {
        name: dataclasses.asdict(total) for name, total in evaluation.channel_totals.items() if name is not None
    }
    metadata = {
        "model": config.model,
        "caches": list(reader.directories),
        "fingerprint": reader.fingerprint,
        "split": reader.split,
        "total": dataclasses.asdict(evaluation.total),
        "channels": channels,
    }
    write_evaluation(config.output, _columns(evaluation), metadata)


def _columns(evaluation: Evaluation) -> dict[str, Any]:
    """The values of all samples by column of the written file."""
    return {
        "sample": list(range(len(evaluation))),
        "source": [evaluation.sources[code] for code in evaluation.source],
        "row": evaluation.row,
        "part": [vars(RowPart(*part)) if any(part) else None for part in evaluation.parts.tolist()],
        "channel": [evaluation.channels[code] if code >= 0 else None for code in evaluation.channel],
        "tokens": evaluation.tokens,
        "target_tokens": evaluation.target_tokens,
        "loss": evaluation.loss,
        "perplexity": evaluation.perplexity,
        "token_accuracy": evaluation.token_accuracy,
        "first_wrong": evaluation.first_wrong,
    }
