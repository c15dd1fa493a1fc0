"""Options of training tools, and a recorder of their optimizer steps for compare_tools.py.

compare_tools.py runs this file in the tool's own interpreter:

    PYTHON _compare_recorder.py SETTINGS.json RECORD.json

``SETTINGS.json`` holds ``tool`` and its ``arguments``. The tools' files are not changed: the recorder replaces methods
of transformers' Trainer in memory.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

BATCH, ACCUMULATION, MAX_LENGTH = 2, 2, 1024
# transformers' names, which packtool, TRL, ms-swift and LLaMA-Factory share.
TRAINING: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "max_grad_norm": 1.0,
    "optim": "adamw_torch",
    "adam_beta2": 0.999,
    "num_train_epochs": 1,
    "logging_steps": 1,
    "seed": 42,
}
Sample = tuple[list[int], list[int]]
DISTRIBUTIONS = {
    "packtool": "packtool",
    "trl": "trl",
    "ms-swift": "ms-swift",
    "llama-factory": "llamafactory",
    "axolotl": "axolotl",
}


@dataclass(frozen=True)
class Example:
    """Files of an example in one folder."""

    name: str
    folder: Path
    accumulation: int = ACCUMULATION
    batch: int = BATCH * ACCUMULATION
    max_steps: int = -1

    @property
    def training(self) -> dict[str, Any]:
        """Options by transformers' names; every accumulation makes steps of the same samples."""
        batch = self.batch // self.accumulation
        options = TRAINING | {"per_device_train_batch_size": batch, "gradient_accumulation_steps": self.accumulation}
        return options | ({"max_steps": self.max_steps} if self.max_steps > 0 else {})

    @property
    def has_pictures(self) -> bool:
        return self.name == "picture"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def rows(self) -> Path:
        """Rows with ``messages`` and ``images``."""
        return self.folder / "rows.jsonl"

    @property
    def prompts(self) -> Path:
        """The rows with ``prompt``, ``completion`` and ``images``, for TRL."""
        return self.folder / "prompts.jsonl"

    @property
    def parts(self) -> Path:
        """The rows with lists as contents, for axolotl."""
        return self.folder / "parts.jsonl"

    @property
    def marked_template(self) -> Path:
        """The chat template with TRL's marks of the assistant's turns."""
        return self.folder / "marked.jinja"


def words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line."""
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]


def trl_arguments(example: Example, output: Path) -> dict[str, Any]:
    """Fields of SFTConfig, the model and the rows."""
    options: dict[str, Any] = {"model": str(example.model), "output_dir": str(output), "max_length": MAX_LENGTH}
    if example.has_pictures:
        options |= {"dataset": str(example.prompts), "completion_only_loss": True}
    else:
        options |= {"dataset": str(example.rows), "assistant_only_loss": True}
        options |= {"chat_template_path": str(example.marked_template)}
    options |= {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none"}
    options |= {"train_sampling_strategy": "sequential", "use_cpu": True, "disable_tqdm": True}
    return example.training | options | {"model_init_kwargs": {"dtype": "float32"}}


def swift_arguments(example: Example, output: Path) -> list[str]:
    """Words of ``swift sft``."""
    template = "qwen3_vl" if example.has_pictures else "qwen3_nothinking"
    options = {"model": example.model, "dataset": example.rows, "output_dir": output}
    options |= {"model_type": "qwen3_vl" if example.has_pictures else "qwen3"}
    options |= {"template": template, "max_length": MAX_LENGTH, "torch_dtype": "float32", "tuner_type": "full"}
    options |= {"dataset_shuffle": False, "train_dataloader_shuffle": False, "split_dataset_ratio": 0}
    options |= {"gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "add_version": False}
    options |= {"dataset_num_proc": 1, "dataloader_num_workers": 0, "freeze_vit": False, "freeze_aligner": False}
    return words(example.training | options)


def llama_factory_arguments(example: Example, output: Path) -> dict[str, Any]:
    """Keys of a LLaMA-Factory YAML file; writes the ``dataset_info.json``."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages"} | ({"images": "images"} if example.has_pictures else {})
    info = {"file_name": example.rows.name, "formatting": "sharegpt", "columns": columns, "tags": tags}
    (example.rows.parent / "dataset_info.json").write_text(json.dumps({"rows": info}))
    options: dict[str, Any] = {"model_name_or_path": str(example.model), "dataset_dir": str(example.rows.parent)}
    options |= {"stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "rows", "bf16": False}
    options |= {"template": "qwen3_vl_nothink" if example.has_pictures else "qwen3_nothink", "cutoff_len": MAX_LENGTH}
    options |= {"disable_shuffling": True, "disable_gradient_checkpointing": True, "save_strategy": "no"}
    options |= {"freeze_vision_tower": False, "freeze_multi_modal_projector": False, "report_to": "none"}
    options |= {"media_dir": str(example.rows.parent), "dataloader_num_workers": 0, "use_cpu": True}
    return example.training | options | {"output_dir": str(output), "flash_attn": "sdpa", "disable_tqdm": True}


def axolotl_arguments(example: Example, output: Path) -> str:
    """Write an axolotl YAML file and return its path."""
    rows = {"path": str(example.rows), "ds_type": "json", "type": "chat_template", "field_messages": "messages"}
    config: dict[str, Any] = {"base_model": str(example.model), "chat_template": "tokenizer_default"}
    config |= {"output_dir": str(output), "datasets": [rows], "sequence_len": MAX_LENGTH, "val_set_size": 0}
    config |= {"dataset_prepared_path": str(output / "prepared"), "sample_packing": False, "bf16": False}
    config |= {"tf32": False, "attn_implementation": "sdpa", "curriculum_sampling": True, "save_strategy": "no"}
    config |= {"shuffle_merged_datasets": False, "pad_to_sequence_len": False, "gradient_checkpointing": False}
    renamed = {
        "per_device_train_batch_size": "micro_batch_size",
        "optim": "optimizer",
        "num_train_epochs": "num_epochs",
    }
    renamed |= {"lr_scheduler_type": "lr_scheduler"}
    config |= {renamed.get(name, name): value for name, value in example.training.items()}
    if example.has_pictures:
        rows["path"] = str(example.parts)
        config |= {"skip_prepare_dataset": True, "remove_unused_columns": False, "processor_type": "AutoProcessor"}
        config |= {"chat_template": "qwen2_vl"}
    output.mkdir(parents=True)
    path = output / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


def packtool_arguments(example: Example, cache: Path, output: Path) -> list[str]:
    """Words of ``packtool train``."""
    options = {"model": example.model, "cached-dataset": cache, "output-dir": output, "packing": False}
    options |= {"shuffle": False, "torch-dtype": "float32", "train-type": "full", "save-strategy": "no"}
    options |= {"freeze-vit": False, "freeze-aligner": False, "gradient-checkpointing": False}
    options |= {"dataloader-num-workers": 0}
    return ["train", *words({name.replace("_", "-"): value for name, value in example.training.items()} | options)]


# Options of each tool's ways of packing, by the name of the setting.
PACKING: dict[str, dict[str, dict[str, Any]]] = {
    "trl": {"packing": {"packing": True}},
    "ms-swift": {
        f"packing, {kernel}": {"packing": True, "attn_impl": kernel, "packing_length": MAX_LENGTH}
        for kernel in ("sdpa", "flash_attention_2")
    },
    "llama-factory": {"packing": {"packing": True}, "neat_packing": {"packing": True, "neat_packing": True}},
    "axolotl": {"sample_packing": {"sample_packing": True}},
}


def with_options(arguments: Any, options: Mapping[str, Any]) -> Any:
    """Add options to a tool's arguments: a dictionary, words, or the path of a configuration file."""
    if isinstance(arguments, dict):
        return arguments | options
    if isinstance(arguments, str):
        path = Path(arguments)
        path.write_text(json.dumps(json.loads(path.read_text()) | options))
        return arguments
    return [word for word in arguments if word.split("=")[0][2:] not in options] + words(options)


ARGUMENTS: dict[str, Callable[[Example, Path], Any]] = {
    "trl": trl_arguments,
    "ms-swift": swift_arguments,
    "llama-factory": llama_factory_arguments,
    "axolotl": axolotl_arguments,
}


def split_batch(
    input_ids: Any, labels: Any, attention_mask: Any = None, position_ids: Any = None, boundaries: Any = None
) -> Iterator[Sample]:
    """Yield the token ids and the targets of each sample in a micro-batch.

    Args:
        input_ids: (B, T).
        labels: (B, T), not shifted, -100 at tokens that are not trained.
        attention_mask: (B, T), 0 on padding; other values may number packed samples.
        position_ids: (B, T), (3, B, T) or (4, B, T); in packed rows, a sample begins where the first is 0.
        boundaries: the first token of each packed sample, and T at the end.

    Yields:
        the ids, and the positions in the sample of the ids that are targets.
    """
    for row, ids in enumerate(input_ids.tolist()):
        kept = [True] * len(ids) if attention_mask is None else attention_mask[row].ne(0).tolist()
        starts = {0} if boundaries is None else set(boundaries.tolist())
        if attention_mask is not None:
            numbers = attention_mask[row].tolist()
            starts |= {i for i in range(1, len(ids)) if numbers[i] != numbers[i - 1]}
        if position_ids is not None:
            text = position_ids if position_ids.ndim == 2 else position_ids[0]
            starts |= {i for i, position in enumerate(text[row].tolist()) if position == 0}
        for start, end in zip(sorted(starts), [*sorted(starts)[1:], len(ids)], strict=True):
            places = [i for i in range(start, end) if kept[i]]
            if places:
                targets = [n for n, i in enumerate(places) if labels[row, i] != -100]
                yield [ids[i] for i in places], targets


class Recorder:
    """Records steps; ``steps`` holds samples, learning rate, loss, gradient norm, micro-batches and start time."""

    def __init__(self) -> None:
        self.steps, self.end = list[dict[str, Any]](), 0.0

    def step_of(self, trainer: Any) -> dict[str, Any]:
        """Return the record of the Trainer's current optimizer step."""
        if len(self.steps) <= trainer.state.global_step:
            rate = float(trainer.optimizer.param_groups[0]["lr"])
            step = {"samples": [], "learning_rate": rate, "loss": 0.0, "micro_batches": 0, "begin": time.process_time()}
            self.steps.append(step)
        return self.steps[trainer.state.global_step]

    def add_batch(self, step: dict[str, Any], samples: Iterator[Sample]) -> None:
        step["samples"] += list(samples)
        step["micro_batches"] += 1

    def patch_trainer(self) -> None:
        """Record the steps of transformers' Trainer and its subclasses."""
        from transformers import Trainer

        train, log = Trainer.training_step, Trainer.log

        def training_step(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            step = self.step_of(trainer)
            fields = [inputs.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q")]
            if fields[0] is not None and fields[0].ndim != 2:
                fields[0] = None
            if fields[1] is not None and fields[1].ndim == 3 and "text_position_ids" in inputs:
                fields[1] = inputs["text_position_ids"]
            if "labels" in inputs:
                self.add_batch(step, split_batch(inputs["input_ids"], inputs["labels"], *fields))
            loss = train(trainer, model, inputs, *args, **kwargs)
            step["loss"] += float(loss)
            return loss

        def write_log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "grad_norm" in logs:
                self.steps[-1]["grad_norm"] = float(logs["grad_norm"])
                self.end = time.process_time()
            log(trainer, logs, *args, **kwargs)

        Trainer.training_step, Trainer.log = training_step, write_log  # type: ignore[method-assign]

    def patch_packtool(self) -> None:
        """Record packtool's steps, whose micro-batches have shifted labels."""
        from packtool.train.loop.trainer import PackTrainer

        train, log = PackTrainer._train_micro_batch, PackTrainer.log

        def train_micro_batch(trainer: Any, model: Any, batch: Any, *args: Any) -> Any:
            labels = torch.cat([torch.full_like(batch.labels[:, :1], -100), batch.labels[:, :-1]], dim=1)
            bounds = getattr(batch, "cu_seqlens", None)
            if bounds is not None:
                bounds = bounds[:-1]
            samples = split_batch(batch.input_ids, labels, batch.is_token, None, bounds)
            self.add_batch(self.step_of(trainer), samples)
            return train(trainer, model, batch, *args)

        def write_log(trainer: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            log(trainer, logs, *args, **kwargs)
            if "loss" in logs:
                self.steps[-1]["loss"] = float(trainer.state.log_history[-1]["loss"])

        for name, method in (("_train_micro_batch", train_micro_batch), ("log", write_log)):
            setattr(PackTrainer, name, method)

    def result(self) -> list[dict[str, Any]]:
        """Return the steps with their seconds, each from its first forward to that of the next step.

        They are CPU seconds of the process, so other programs on the machine do not count.
        """
        ends = [step["begin"] for step in self.steps[1:]] + [self.end]
        for step, end in zip(self.steps, ends, strict=True):
            step["seconds"] = end - step.pop("begin")
        return self.steps


def substitute_flash_attention() -> None:
    """Let transformers use flash attention without a GPU: with SDPA for each sequence in place of its kernels."""
    from transformers import PreTrainedModel, modeling_flash_attention_utils

    def attend(q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: Any = None, causal: bool = False) -> Any:
        heads_first = [each.transpose(1, 2) for each in (q, k, v)]  # (B, H, T, D)
        options = {"dropout_p": dropout_p, "scale": softmax_scale, "is_causal": causal, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, **options).transpose(1, 2)

    def attend_by_sequence(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, causal: bool = False, **others: Any) -> Any:
        pieces = pairwise(cu_seqlens_q.tolist())
        scale = others.get("softmax_scale")
        outputs = [
            attend(*(each[None, start:end] for each in (q, k, v)), softmax_scale=scale, causal=causal)
            for start, end in pieces
        ]
        return torch.cat(outputs, dim=1)[0]

    def functions(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        flash = modeling_flash_attention_utils
        return attend, attend_by_sequence, None, flash._pad_input, flash._unpad_input

    modeling_flash_attention_utils._lazy_imports = functions
    PreTrainedModel._flash_attn_can_dispatch = lambda *args, **kwargs: True


def run_trl(arguments: dict[str, Any]) -> None:
    """Train with TRL's SFTTrainer."""
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer

    model, rows = arguments.pop("model"), arguments.pop("dataset")
    data = load_dataset("json", data_files=rows, split="train")
    if "images" in data.column_names:
        from datasets import Image, Sequence

        data = data.cast_column("images", Sequence(Image()))
    SFTTrainer(model=model, args=SFTConfig(**arguments), train_dataset=data).train()


def run_tool(tool: str, arguments: Any) -> None:
    """Run a tool's own training command in this process."""
    run: Callable[..., Any]
    if tool == "packtool":
        from packtool.cli.main import run

        if run(arguments):
            raise SystemExit("packtool has failed")
    elif tool == "trl":
        run_trl(arguments)
    elif tool == "ms-swift":
        from swift import sft_main as run

        substitute_flash_attention()
        run(arguments)
    elif tool == "llama-factory":
        from llamafactory.train.tuner import run_exp as run

        run(arguments)
    else:
        from axolotl.cli.train import do_cli as run

        run(arguments)


def main(settings_path: str, record_path: str) -> None:
    """Run the tool of a settings file and write its record."""
    settings = json.loads(Path(settings_path).read_text())
    torch.set_num_threads(1)
    sys.argv = sys.argv[:1]  # the tools read it too
    recorder = Recorder()
    recorder.patch_trainer()
    if settings["tool"] == "packtool":
        recorder.patch_packtool()
    run_tool(settings["tool"], settings["arguments"])
    versions = {name: importlib.metadata.version(name) for name in (DISTRIBUTIONS[settings["tool"]], "transformers")}
    Path(record_path).write_text(json.dumps({"versions": versions, "steps": recorder.result()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
