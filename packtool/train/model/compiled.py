"""``--torch-compile`` and ``--use-liger-kernel``: faster layers, and checks of both before any weight is read.

The layers of the language model are compiled one by one. All layers of a class share one compilation for each length
of a micro-batch, and padding makes these lengths few. Inside a layer, attention, recurrent layers and experts are not
compiled, because their shapes differ in every micro-batch; norms, projections, positions, gates and MLPs are compiled:

    compiled     norm, q k v, positions |           | output projection, norm, MLP or router |         | sum
    eager                               | attention |                                        | experts |

Towers, embeddings, the head and evaluation are not compiled either. A layer becomes an instance of a subclass that
compiles its class's forward, so that checkpointing and FSDP, which wrap the forward, are not compiled.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import list_backends

from packtool.attention.kernel import hide_boundaries
from packtool.errors import ConfigError, UnsupportedModelError, did_you_mean
from packtool.train.model.loss import base_model

_MAX_COMPILATIONS = 128
"""Maximum compilations of one function: layer classes x lengths x 2 (inputs with and without a gradient)."""

_DEBUG_BACKENDS = ("aot_eager", "eager")
"""Backends that generate no kernels."""

_COMPILE_REMEDY = "Leave --torch-compile out; the losses are the same."


def compile_layers(model: nn.Module, backend: str) -> int:
    """Compile the layers of a model's language model for training, in place; return their number.

    ``backend`` is the name of one of torch's compilers. Call this once, after ``route_attention`` and
    ``make_trainable``, and before FSDP or DDP wraps the model.
    """
    inner = base_model(model)
    layers = getattr(inner.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise UnsupportedModelError(
            f"--torch-compile true: cannot find the layers of a {type(inner).__name__}", _COMPILE_REMEDY
        )
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _MAX_COMPILATIONS)
    # Each layer is a graph of its own. By default, DDP's buckets of gradients would divide it further.
    dynamo_config.optimize_ddp = False

    # Layers of one class share its compiled subclass, so that each class is compiled once.
    layer_classes = {type(layer) for layer in layers}
    compiled_classes = {layer_class: _compiled_class(layer_class, backend) for layer_class in layer_classes}
    for layer in layers:
        _leave_experts_uncompiled(layer)
        layer.__class__ = compiled_classes[type(layer)]  # instead of a new module, to keep its weights and hooks
    return len(layers)


def _leave_experts_uncompiled(layer: nn.Module) -> None:
    """Let the experts of a layer run without compilation, because their shapes differ in every micro-batch."""
    disable: Any = torch.compiler.disable
    for module in layer.modules():
        if type(module).__name__.endswith("Experts"):
            # A bound method instead of a function, because a deep copy of the model binds it to the copy.
            module.forward = types.MethodType(disable(type(module).forward), module)


def _compiled_class(cls: type[nn.Module], backend: str) -> type[nn.Module]:
    """Return a subclass of a layer class with a compiled forward; it keeps the name, by which FSDP finds layers."""
    original: Any = cls.forward
    # Static shapes: a graph for any length would be slower, and compiled only when the second length appears.
    compiled: Any = torch.compile(original, backend=backend, dynamic=False)

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return original(layer, *args, **kwargs)
        return compiled(layer, *args, **hide_boundaries(kwargs))

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__})


def check_backend(backend: str, device: torch.device) -> None:
    """Check that a backend of torch compiles and runs a small function on this device, forward and backward.

    Raise a ConfigError if it does not, or if torch has no backend of this name.
    """
    all_backends = list_backends(exclude_tags=())
    if backend not in all_backends:
        listed = [*list_backends(), *_DEBUG_BACKENDS]  # without other backends for developers of compilers
        raise ConfigError(
            f"--torch-compile-backend {backend}: torch has no such backend{did_you_mean(backend, listed)}",
            f"Choose from {', '.join(listed)}; the default is inductor.",
        )
    try:
        compiled = torch.compile(lambda numbers: (numbers * 2).sin(), backend=backend, dynamic=False)
        numbers = torch.ones(2, device=device, requires_grad=True)
        compiled(numbers).sum().backward()
    except Exception as error:  # any error of a missing compiler
        error_lines = str(error).splitlines()
        reason = error_lines[0] if error_lines else ""
        raise ConfigError(
            f"--torch-compile true: {backend} does not work on this machine: {type(error).__name__}: {reason}",
            f"On a CPU inductor needs a C++ compiler, on a GPU Triton. {_COMPILE_REMEDY}",
        ) from error


_LIGER_REMEDY = "Leave --use-liger-kernel out; the losses are the same."
# Also used by the Trainer. Liger's losses are off, because packtool computes the loss itself.
LIGER_SETTINGS = {"fused_linear_cross_entropy": False, "cross_entropy": False}


def refuse_without_liger(*, on_gpu: bool) -> None:
    """Raise if Liger's kernels cannot be used with any model: no GPU or no package."""
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--use-liger-kernel true: the package liger-kernel cannot be imported: {error}",
            f"pip install liger-kernel. {_LIGER_REMEDY}",
        ) from error
    if not on_gpu:
        raise ConfigError("--use-liger-kernel: Liger's kernels need a GPU; this machine has none", _LIGER_REMEDY)


def liger_warning(model: nn.Module, model_type: str) -> str | None:
    """Check whether Liger's fast kernels can replace parts of a model; return a warning if not, else None.

    ``model`` is on the meta device. It is patched in place, as the Trainer will patch the trained model. A model with a
    warning is trained without these kernels.
    """
    import liger_kernel.transformers as liger
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as MODEL_TYPES

    warning = "warning: --use-liger-kernel has no effect:"
    if model_type not in MODEL_TYPES:
        return f"{warning} Liger has no kernels for {model_type} models"
    try:
        liger._apply_liger_kernel_to_instance(model=base_model(model), **LIGER_SETTINGS)
    except Exception as error:  # any error of a package that patches another one's internals
        return (
            f"{warning} this version of Liger fails for a {model_type} model in this version of transformers; another "
            f"version of liger-kernel may work ({type(error).__name__}: {error})"
        )
    return None
