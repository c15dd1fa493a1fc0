"""``--torch-compile``: the layers of the language model compiled one by one, with what cannot be left as it is.

All layers of a kind share one compilation for each length of a micro-batch; ``train.prepare.lengths`` makes these few.
Inside a layer three things run uncompiled, because what they do differs in every micro-batch: attention, recurrent
layers and experts. What lies between them is compiled: norms, projections, positions, gates and MLPs.

    compiled     norm, q k v, positions |           | output projection, norm, MLP or router |         | sum
    as ever                             | attention |                                        | experts |

Towers, embeddings, the head and evaluation run as ever, too. A layer becomes an instance of a subclass that compiles
its class's forward, so that checkpointing and FSDP, which stand around the forward, stay outside of what is compiled.

``--use-liger-kernel`` tried before any weight is read: Liger patches the insides of models, and some do not fit.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import list_backends

from packtool.attention.kernel import hide_boundaries
from packtool.errors import ConfigError, UnsupportedModelError, did_you_mean

_MOST_COMPILATIONS = 128
"""Compilations of one function: kinds of layers, times lengths, and twice for inputs with and without a gradient."""

_TO_FIND_MISTAKES = ("aot_eager", "eager")
"""Backends that make no kernels."""

_COMPILE_REMEDY = "Leave --torch-compile out; the losses are the same."


def compile_layers(model: nn.Module, backend: str) -> int:
    """Compile the layers of a model's language model, in training; may be called once for a model.

    Args:
        model: routed through packed attention and made trainable, not yet wrapped for several processes.
        backend: what ``torch.compile`` takes.

    Returns:
        how many layers there are.

    Raises:
        UnsupportedModelError: if a model does not say which its layers are.
    """
    layers = _layers_of(model)
    dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, _MOST_COMPILATIONS)
    # Cuts graphs where DDP's buckets end; here they end with every layer.
    dynamo_config.optimize_ddp = False
    kinds = {kind: _compiled(kind, backend) for kind in {type(layer) for layer in layers}}
    as_ever: Any = torch.compiler.disable
    for layer in layers:
        for module in layer.modules():
            if type(module).__name__.endswith("Experts"):
                # A bound method, which a deep copy binds to the copy.
                module.forward = types.MethodType(as_ever(type(module).forward), module)
        layer.__class__ = kinds[type(layer)]
    return len(layers)


def _layers_of(model: nn.Module) -> Sequence[nn.Module]:
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    layers = getattr(inner.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise UnsupportedModelError(
            f"--torch-compile true: a {type(inner).__name__} does not say which modules are its layers", _COMPILE_REMEDY
        )
    return list(layers)


def _compiled(kind: type[nn.Module], backend: str) -> type[nn.Module]:
    """The subclass of a layer's class that compiles its forward; it has the same name, by which FSDP finds layers."""
    own: Any = kind.forward
    # Static: a graph for any length would be slower, and made in the middle of a run, when a second length comes.
    compiled: Any = torch.compile(own, backend=backend, dynamic=False)

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not layer.training:
            return own(layer, *args, **kwargs)
        return compiled(layer, *args, **hide_boundaries(kwargs))

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


def check_backend(backend: str, device: torch.device) -> None:
    """Try a backend on a function of two operations, forward and backward.

    Raises:
        ConfigError: if torch has no such backend, or what it needs (a compiler, Triton) is not there.
    """
    if backend not in list_backends(exclude_tags=()):
        # The others are for those who write compilers.
        known = [*list_backends(), *_TO_FIND_MISTAKES]
        raise ConfigError(
            f"--torch-compile-backend {backend}: torch has no such backend{did_you_mean(backend, known)}",
            f"It has {', '.join(known)}; by default inductor is taken.",
        )
    try:
        tried = torch.compile(lambda numbers: (numbers * 2).sin(), backend=backend, dynamic=False)
        tried(torch.ones(2, device=device, requires_grad=True)).sum().backward()
    except Exception as error:  # whatever a compiler says that is not there
        said = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"--torch-compile true: {backend} does not work on this machine: {type(error).__name__}: {said}",
            f"On a CPU inductor needs a C++ compiler, on a GPU Triton. {_COMPILE_REMEDY}",
        ) from error


_LIGER_REMEDY = "Leave --use-liger-kernel out; the losses are the same."
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
            f"pip install liger-kernel. {_LIGER_REMEDY}",
        ) from error
    if not on_gpu:
        raise ConfigError("--use-liger-kernel: Liger's kernels need a GPU, and this machine has none", _LIGER_REMEDY)
    known: dict[str, Any] = KNOWN
    if model_type not in known:
        raise UnsupportedModelError(
            f"--use-liger-kernel: Liger has no kernels for a {model_type} model, and would leave it as it is",
            _LIGER_REMEDY,
        )
    try:
        bare = model.get_base_model() if isinstance(model, PeftModel) else model
        liger._apply_liger_kernel_to_instance(model=bare, **SETTINGS)
    except Exception as error:  # whatever a package does not expect of another one's insides
        raise UnsupportedModelError(
            f"--use-liger-kernel: this version of Liger fails for a {model_type} model in this version of "
            f"transformers: {type(error).__name__}: {error}",
            f"{_LIGER_REMEDY} Another version of liger-kernel may do.",
        ) from error
