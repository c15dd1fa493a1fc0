"""The result of a run (``packtool_train.json``, table and ``--json``), and log lines on its settings and schedule."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packtool.cache.evaluation_file import plain_json
from packtool.config.commands import VerifyConfig
from packtool.config.plan import PlanConfig
from packtool.config.settings import flag
from packtool.config.train import TrainConfig
from packtool.planning.summary import (
    MIN_GROWTH_FOR_ADVICE,
    PlanSummary,
    SkrullFigures,
    batch_sentence,
    fixed_batch_clause,
    learning_rate_advice,
)
from packtool.train.prepare.caches import named_sources
from packtool.train.prepare.output_dir import RESULT_NAME
from packtool.train.prepare.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished (or, with ``--dry-run``, a planned) run.

    Args:
        num_samples: in the plan of an epoch.
        filtered: samples of the caches that are longer than ``max_length``, or not in ``--plan``.
        num_repeats: samples of the plan that a mixture repeats.
        not_drawn: samples of the caches that a mixture draws in other epochs.
        num_packs: of an epoch; padded rows without packing.
        fill: true tokens over computed tokens, 0 to 1.
        num_empty_micro_batches: zero-loss micro-batches of the whole run.
        target_tokens: of the steps of this run, after resuming.
        seconds: between the first step and the last checkpoint.
        first_loss, last_loss: mean over the target tokens of the first and the last log line that has any.
        streaming: True if rows were streamed; figures of samples then count those that were trained.
        num_shared_tokens: tokens that a streaming run saved by shared prefixes.
        num_skipped: samples that ``--on-bad-media skip`` left out of the steps of this run.
        dropped: rows of a streaming run that could not be used, by reason.
        parts_left_out: turns and responses of its other rows that could not be used, by reason.
        sources: of a mixture, by name: counts and shares of samples, tokens and target tokens, and epochs, in the steps
            of this run; in a dry run of its first epoch.
        stages: figures of each stage; figures of the plan are those of the first stage.
    """

    num_samples: int
    filtered: int
    num_packs: int
    samples_per_pack: float
    fill: float
    packing: bool
    max_length: int
    packing_length: int
    steps: int
    steps_without_packing: int
    num_empty_micro_batches: int
    num_processes: int
    target_tokens: int
    output_dir: str
    seconds: float = 0.0
    num_repeats: int = 0
    not_drawn: int = 0
    target_tokens_per_second: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    checkpoint: str | None = None
    resumed_from: str | None = None
    num_trainable_parameters: int | None = None
    num_parameters: int | None = None
    num_shared_tokens: int = 0
    num_skipped: int = 0
    streaming: bool = False
    dropped: Mapping[str, int] = field(default_factory=dict)
    parts_left_out: Mapping[str, int] = field(default_factory=dict)
    sources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stages: Sequence[Mapping[str, Any]] = field(default_factory=list)

    def write(self) -> None:
        """Write the result into the output directory, as JSON."""
        with open(os.path.join(self.output_dir, RESULT_NAME), "w", encoding="utf-8") as file:
            json.dump(plain_json(dataclasses.asdict(self)), file, indent=1)
            file.write("\n")


def settings_lines(config: TrainConfig) -> Iterator[str]:
    """The settings other than defaults, on one line, as options."""
    yield f"settings: {shlex.join(option_words(config))}"


def non_default_options(config: TrainConfig | PlanConfig | VerifyConfig) -> dict[str, Any]:
    """The settings other than defaults by name, without caches that a recipe names."""
    options: dict[str, Any] = {}
    for setting in dataclasses.fields(config):
        value = getattr(config, setting.name)
        default = setting.default_factory() if callable(setting.default_factory) else setting.default
        if value != default and not (setting.name == "cached_dataset" and getattr(config, "mix", None) is not None):
            options[setting.name] = value
    return options


def option_words(config: TrainConfig | PlanConfig | VerifyConfig) -> list[str]:
    """The settings other than defaults, as words of a command line."""
    words: list[str] = []
    has_flag = {setting.name: setting.metadata["panel"] is not None for setting in dataclasses.fields(config)}
    for name, value in non_default_options(config).items():
        if isinstance(value, Mapping) and not has_flag[name]:
            for key, item in value.items():
                words += ["--set", f"{name}.{key}={json.dumps(item)}"]
        elif isinstance(value, Mapping):
            words += [flag(name), json.dumps(value)]
        elif isinstance(value, tuple):
            words += [flag(name), *value]
        else:
            words += [flag(name), str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def next_lines(config: TrainConfig, result: TrainResult) -> Iterator[str]:
    """Commands to evaluate, load and merge the trained model."""
    if result.checkpoint is None:
        return
    caches = shlex.join(named_sources(config)[0] or ("CACHE",))
    checkpoint = shlex.quote(result.checkpoint)
    few_bits = "" if config.quant_bits is None else f" --quant-bits {config.quant_bits}"
    yield f"evaluate: packtool eval --model {checkpoint} --cached-dataset {caches} --output eval.parquet{few_bits}"
    if config.train_type != "full":
        yield f'load: peft.PeftModel.from_pretrained(model, "{result.checkpoint}")  # onto {config.model}'
        yield f"merge: packtool merge {checkpoint} --output MERGED"
    else:
        from packtool.batch.spec import auto_class, model_config  # torch, which a launcher does not need

        auto = auto_class(model_config(config.model))
        yield f'load: transformers.{auto.__name__}.from_pretrained("{result.checkpoint}")'


def schedule_lines(config: TrainConfig, timeline: Timeline, num_processes: int) -> Iterator[str]:
    """Describe the plan before the first step."""
    summary = timeline.first_plan.summary
    yield from _sample_lines(config, timeline)
    processes = f"{num_processes} process{'es' if num_processes > 1 else ''}"
    if summary.skrull is not None:
        yield _skrull_line(summary, summary.skrull)
        yield f"optimizer steps: {timeline.num_steps:,}; {processes}"
        yield from _batch_lines(config, timeline)
    elif summary.options.packing:
        yield from _packing_lines(config, timeline, processes)
    else:
        unpacked = "padded rows of one sample each (--packing false)"
        if (num_tokens := config.dynamic_batch_tokens) is not None:
            unpacked = f"batches of up to {num_tokens:,} tokens without padding (--dynamic-batch-tokens)"
        yield f"packing: no, but {unpacked}; {summary.fill:.1%} of tokens are not padding; {processes}"
        yield f"optimizer steps: {timeline.num_steps:,}"


def _sample_lines(config: TrainConfig, timeline: Timeline) -> Iterator[str]:
    """Describe the samples of the first epoch, and those of the caches that it leaves out."""
    summary = timeline.first_plan.summary
    line = f"samples in the caches: {summary.num_cached:,}"
    if summary.num_filtered:
        left_out = f"longer than {summary.options.max_length:,} tokens"
        if config.plan is not None:
            left_out = f"that are not in --plan {config.plan}"
        elif timeline.inputs.mixture is not None:  # sources of a mixture may have limits
            left_out += ", or excluded by the limits of their source,"
        line += f"; {summary.num_filtered:,} {left_out} are left out"
    if summary.num_not_drawn:
        line += f"; {summary.num_not_drawn:,} are not drawn in this epoch"
    yield line
    num_repeats = summary.num_samples - summary.num_distinct
    repeated = f", {num_repeats:,} of them repeated" if num_repeats else ""
    yield f"samples to train on: {summary.num_samples:,}{repeated}; longest: {summary.longest:,} tokens"


def _skrull_line(summary: PlanSummary, skrull: SkrullFigures) -> str:
    """Describe the micro-batches of an epoch that Skrull schedules."""
    plural = "es" if skrull.num_micro_batches != 1 else ""
    line = (
        f"skrull: {skrull.num_micro_batches:,} micro-batch{plural} of {skrull.options.bucket_size:,} tokens at most "
        f"per process, {skrull.bucket_fill:.1%} full, and {summary.num_empty_micro_batches:,} empty ones"
    )
    num_sharing = skrull.options.sequence_parallel_size
    if num_sharing > 1:
        local_share = skrull.num_local_tokens / summary.num_tokens
        line += f"; {local_share:.1%} of the tokens are local to a process, the others shared by {num_sharing}"
    return line


def _packing_lines(config: TrainConfig, timeline: Timeline, processes: str) -> Iterator[str]:
    """Describe the packs of an epoch and the optimizer steps of the run, for the log; not with the scheduler Skrull.

    ``processes`` is text such as ``8 processes``.
    """
    summary = timeline.first_plan.summary
    num_steps = timeline.num_steps
    yield (
        f"packing: yes (--packing false pads); packing length: {summary.options.packing_length:,}, packing processes: "
        f"{summary.options.packing_num_proc}, {processes}"
    )
    fill_text = f"{summary.samples_per_pack:.2f} samples a pack, fill {summary.fill:.2%}"
    if config.samples_per_step is not None:
        batch_clause = fixed_batch_clause(summary, timeline.first_plan.steps)
        yield f"packs: {summary.num_packs:,}, {fill_text} (free space is not computed)"
        yield f"optimizer steps: {num_steps:,}, as without packing; {batch_clause}"
        return

    yield f"packs: {summary.num_packs:,} (at least {summary.lower_bound:,} are needed), {fill_text}"
    last_step = last_step_line(timeline)
    if last_step is not None:
        yield last_step
    num_unpacked_steps = timeline.num_steps_without_packing()
    saved_fraction = 1 - num_steps / num_unpacked_steps
    yield (
        f"optimizer steps: {num_steps:,} with packing, {num_unpacked_steps:,} with one sample per row "
        f"({saved_fraction:.0%} fewer)"
    )
    yield from _batch_lines(config, timeline)


def _batch_lines(config: TrainConfig, timeline: Timeline) -> Iterator[str]:
    """Compare the batch with that of unpacked training, and advise on learning rate and warm-up."""
    if not config.packing:
        return
    summary = timeline.first_plan.summary
    yield batch_sentence(summary)
    if summary.batch_growth >= MIN_GROWTH_FOR_ADVICE:
        steps, plain = timeline.num_steps, timeline.num_steps_without_packing()
        yield (
            f"{learning_rate_advice(summary.batch_growth, config.optim)}; warm-up: "
            f"{config.num_warmup_steps(steps):,} of {steps:,} steps, unpacked "
            f"{config.num_warmup_steps(plain):,} of {plain:,}"
        )


def last_step_line(timeline: Timeline) -> str | None:
    """A line on an epoch's last step if it is smaller than the others."""
    steps = timeline.first_plan.steps
    packs_before = steps.micro_batch_offsets[steps.step_offsets]
    full, last = int(packs_before[1]), int(packs_before[-1] - packs_before[-2])
    if last == full and not steps.num_empty_micro_batches:
        return None
    filled = f", completed with {steps.num_empty_micro_batches} empty micro-batches"
    return (
        f"packs per step: {full:,}; in the last step of an epoch: {last:,}"
        f"{filled if steps.num_empty_micro_batches else ''}; no pack is dropped"
    )
