"""Types of the options that the library's functions take.

Made by scripts/make_docs.py from the declarations in config/; do not edit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Text = str | os.PathLike[str]
Texts = Text | Sequence[Text]
Values = Mapping[str, Any] | str

class ExportKeywords(TypedDict, total=False):
    """See ``packtool.config.data.ExportConfig``."""

    max_pixels: int | None
    min_pixels: int | None
    image_max_token_num: int | str | None
    image_min_token_num: int | str | None
    resize: int | None
    fps: float | None
    fps_min_frames: int | None
    fps_max_frames: int | None
    video_max_pixels: int | None
    video_min_pixels: int | None
    video_total_pixels: int | None
    video_max_token_num: int | str | None
    video_min_token_num: int | str | None
    use_audio_in_video: bool | None
    sampling_rate: int | None
    bbox_type: Literal["real", "norm1", "norm1000"] | None
    bbox_format: Literal["legacy", "new"] | None
    norm_bbox: Literal["norm1000", "none"] | None
    model: Text | None
    max_length: int | str | None
    min_length: int | str | None
    truncation_strategy: Literal["delete", "left", "right", "split", "raise"] | None
    media_overflow: Literal["drop", "trim", "raise"] | None
    loss_scale: Text | None
    expand_turns: Literal["auto", "true", "false"] | None
    chat_template: Text | None
    chat_template_kwargs: Values | None
    media: Literal["reference", "embed"] | None
    media_access: Literal["root", "local", "any"] | None
    max_media_bytes: int | str | None
    dataset: Texts | None
    val_dataset: Texts | None
    dataset_info: Text | None
    columns: Texts | None
    system: Text | None
    prompt_format: Text | None
    media_root: Text | None
    max_media_failures: int | None
    per_dataset_loss_scale: bool | None
    split_dataset_ratio: float | None
    use_hf: bool | None
    strict: bool | None
    max_row_bytes: int | str | None
    dataset_num_proc: int | None
    output_dir: Text | None
    check_against: Texts | None
    on_duplicates: Literal["keep", "drop"] | None
    near_duplicates: float | None
    on_overlap: Literal["keep", "drop", "fail"] | None
    seed: int | None
    rows_per_shard: int | None
    to_cached_dataset: bool | None
    overwrite: bool | None
    repair: bool | None
    executor: Literal["local", "ray"] | None
    ray_address: Text | None
    task_index: int | None
    num_tasks: int | None
    finalize: bool | None
    dry_run: bool | None

class PlanKeywords(TypedDict, total=False):
    """See ``packtool.config.plan.PlanConfig``."""

    train_type: Literal["lora", "full", "boft", "bone", "oft", "vera"] | None
    lora_rank: int | None
    freeze_vit: bool | None
    freeze_aligner: bool | None
    freeze_llm: bool | None
    lora_bias: Literal["none", "all", "lora_only"] | None
    target_modules: Texts | None
    target_regex: Text | None
    target_parameters: Texts | None
    modules_to_save: Texts | None
    freeze_parameters: Texts | None
    freeze_parameters_regex: Text | None
    freeze_parameters_ratio: float | None
    trainable_parameters: Texts | None
    trainable_parameters_regex: Text | None
    adapters: Texts | None
    lora_alpha: int | None
    lora_dropout: float | None
    use_rslora: bool | None
    use_dora: bool | None
    init_weights: Literal["true", "false", "gaussian", "orthogonal", "pissa", "olora"] | None
    adapter_settings: Values | None
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None
    master_weights: Literal["float32", "kahan", "none"] | None
    gradient_checkpointing: bool | str | None
    memory_budget: int | str | None
    vit_gradient_checkpointing: bool | None
    deepspeed: Text | None
    fsdp: Texts | None
    sequence_parallel_size: int | None
    sequence_parallel_type: Literal["auto", "ulysses", "ring", "allgather"] | None
    ulysses_size: int | None
    ring_size: int | None
    shuffle: bool | None
    packing_algorithm: Literal["best_fit", "binpacking", "sequential"] | None
    packing_num_proc: int | None
    packing_window: int | None
    packing_batch_size: int | None
    look_ahead: int | None
    max_samples_per_pack: int | None
    max_media_tokens_per_pack: int | str | None
    packing_length: int | str | None
    max_length: int | str | None
    balance: Literal["none", "within-step", "window"] | None
    group_by_length: bool | None
    dynamic_batch_tokens: int | str | None
    dynamic_max_batch_size: int | None
    per_device_train_batch_size: int | None
    gradient_accumulation_steps: int | None
    samples_per_step: int | None
    share_prefix: Literal["auto", "true", "false"] | None
    packs_per_step: int | None
    schedule: Literal["packs", "skrull"] | None
    bucket_size: Text | None
    max_rows_per_tree: int | None
    use_dynamic_bsz: bool | None
    seed: int | None
    mix: Text | None
    mix_stop: Literal["first", "all"] | None
    resample: bool | None
    interleave_probs: Texts | None
    mix_strategy: Literal["concat", "interleave_under", "interleave_over", "interleave_once"] | None
    cache_dir: Text | None
    cache_dir_size: int | str | None
    verify_cache: Literal["always", "once", "never"] | None
    lengths: Text | None
    model: Text | None
    packing: bool | None
    world_size: int | None
    num_train_epochs: float | None
    max_steps: int | None
    hardware: Text | None
    tflops: float | None
    mfu: float | None

class BatchKeywords(TypedDict, total=False):
    """See ``packtool.config.train.TrainConfig``."""

    media_access: Literal["root", "local", "any"] | None
    max_media_bytes: int | str | None
    media_root: Text | None
    media_cache: Text | None
    media_cache_size: int | str | None
    loss_scale: Text | None
    max_steps: int | None
    loss_reduction: Literal["token", "sample"] | None
    torch_compile: bool | None
    dataloader_num_workers: int | None

class VerifyKeywords(TypedDict, total=False):
    """See ``packtool.config.commands.VerifyConfig``."""

    share_prefix: Literal["auto", "true", "false"] | None
    ddp_timeout: int | None
    sequence_parallel_size: int | None
    sequence_parallel_type: Literal["auto", "ulysses", "ring", "allgather"] | None
    ulysses_size: int | None
    ring_size: int | None
    media_access: Literal["root", "local", "any"] | None
    max_media_bytes: int | str | None
    cache_dir: Text | None
    cache_dir_size: int | str | None
    verify_cache: Literal["always", "once", "never"] | None
    model: Text | None
    cached_dataset: Texts | None
    packing_length: int | str | None
    num_packs: int | None
    attn_impl: Literal["auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex"] | None
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None
    trajectory: int | None
    samples_per_step: int | None
    seed: int | None
    html: Text | None

class EvalKeywords(TypedDict, total=False):
    """See ``packtool.config.commands.EvalConfig``."""

    quant_method: Literal["bnb"] | None
    quant_bits: int | None
    bnb_4bit_quant_type: Literal["nf4", "fp4"] | None
    bnb_4bit_use_double_quant: bool | None
    share_prefix: Literal["auto", "true", "false"] | None
    ddp_timeout: int | None
    sequence_parallel_size: int | None
    sequence_parallel_type: Literal["auto", "ulysses", "ring", "allgather"] | None
    ulysses_size: int | None
    ring_size: int | None
    media_access: Literal["root", "local", "any"] | None
    max_media_bytes: int | str | None
    media_cache: Text | None
    media_cache_size: int | str | None
    cache_dir: Text | None
    cache_dir_size: int | str | None
    verify_cache: Literal["always", "once", "never"] | None
    model: Text | None
    base_model: Text | None
    cached_dataset: Texts | None
    output: Text | None
    split: Literal["train", "val"] | None
    max_tokens_per_micro_batch: int | str | None
    max_samples_per_micro_batch: int | None
    limit: int | None
    torch_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None
    attn_impl: Literal["auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex"] | None
    dataloader_num_workers: int | None
