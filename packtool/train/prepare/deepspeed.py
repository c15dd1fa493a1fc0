"""DeepSpeed's settings by the value of ``--deepspeed``: a name, or a JSON file."""

from __future__ import annotations

import re
from typing import Any

from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError


def deepspeed_settings(name: str) -> dict[str, Any]:
    """Return DeepSpeed's settings by name, or from a JSON file with this path.

    The name ``zeroN``, for N from 0 to 3, shards optimizer states (from 1 on), gradients (from 2) and weights (3).
    ``zeroN_offload`` also keeps optimizer states, and with 3 weights, in the machine's memory.
    """
    match = re.fullmatch(r"zero([0-3])(_offload)?", name)
    if match is None:
        try:
            with open(name, encoding="utf-8") as file:
                return dict(load_json(file.read()))
        except (OSError, ValueError, TypeError) as error:
            remedy = "Give zero0, zero1, zero2, zero3, or a JSON file of DeepSpeed's settings."
            raise ConfigError(f"--deepspeed {name}: {error}", remedy) from error
    stage, offload = int(match[1]), match[2] is not None
    if offload and stage < 2:
        raise ConfigError(f"--deepspeed {name}: only zero2 and zero3 can be offloaded")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if stage == 3:
        zero |= {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
        zero |= {"stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": True}
    if offload:
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
        zero |= {"offload_param": {"device": "cpu", "pin_memory": True}} if stage == 3 else {}
    return {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


def zero_stage(config: TrainConfig) -> int:
    """Return DeepSpeed's ZeRO stage, 0 to 3; 0 without DeepSpeed."""
    if config.deepspeed is None:
        return 0
    return int((deepspeed_settings(config.deepspeed).get("zero_optimization") or {}).get("stage") or 0)
