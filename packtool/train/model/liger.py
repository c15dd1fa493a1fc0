"""``--use-liger-kernel`` tried before any weight is read: Liger patches the insides of models, and some do not fit."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from torch import nn

from packtool.errors import ConfigError, UnsupportedModelError

_REMEDY = "Leave --use-liger-kernel out; the losses are the same."
# What the Trainer is told, too; the loss is made in packtool's own head.
SETTINGS = {"fused_linear_cross_entropy": False, "cross_entropy": False}


def refuse_without_liger(model: nn.Module, model_type: str, *, on_gpu: bool) -> None:
    """Raise where Liger's kernels would not be used, or would fail in the middle of the run's start.

    Args:
        model: on the meta device; patched afterwards, as the model that is trained will be.

    Raises:
        ConfigError: without a GPU, or without the package.
        UnsupportedModelError: for a family that this version of Liger does not know, or fails to patch.
    """
    try:
        import liger_kernel.transformers as liger
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN
    except ImportError as error:
        raise ConfigError(
            f"--use-liger-kernel true: Liger's kernels are not installed, or do not import: {error}",
            f"pip install liger-kernel. {_REMEDY}",
        ) from error
    if not on_gpu:
        raise ConfigError("--use-liger-kernel: Liger's kernels need a GPU, and this machine has none", _REMEDY)
    known: dict[str, Any] = KNOWN
    if model_type not in known:
        raise UnsupportedModelError(
            f"--use-liger-kernel: Liger has no kernels for a {model_type} model, and would leave it as it is", _REMEDY
        )
    try:
        bare = model.get_base_model() if isinstance(model, PeftModel) else model
        liger._apply_liger_kernel_to_instance(model=bare, **SETTINGS)
    except Exception as error:  # whatever a package does not expect of another one's insides
        raise UnsupportedModelError(
            f"--use-liger-kernel: this version of Liger fails for a {model_type} model in this version of "
            f"transformers: {type(error).__name__}: {error}",
            f"{_REMEDY} Another version of liger-kernel may do.",
        ) from error
