"""Modules of language models that ``layers`` has no formulas for, counted in forward passes of transformers' model.

The model is on the meta device: it has no weights and computes nothing, so counting takes a few seconds at most.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.utils import logging

from packtool.planning.module_cost import LanguageModules, ModuleCost, ModuleKind

aten = torch.ops.aten
_CHUNK_SETTINGS = ("chunk_size", "mamba_chunk_size", "block_size")
_DELTA_CHUNK = 64  # tokens in a chunk of delta rules, which have no setting for it
_COUNTED: dict[str, LanguageModules | None] = {}  # by settings


def count_modules(text: Mapping[str, Any]) -> LanguageModules | None:
    """Count the modules of a language model, from its ``config.json``; None if transformers cannot build or run it."""
    key = repr(sorted(text.items()))
    if key not in _COUNTED:
        logs: Any = logging
        verbosity = logs.get_verbosity()
        logs.set_verbosity_error()  # models warn that faster kernels are not installed
        try:
            _COUNTED[key] = _count(text)
        except Exception:  # an unknown type, a package that is not installed, an operation that needs values, ...
            _COUNTED[key] = None
        finally:
            logs.set_verbosity(verbosity)
    return _COUNTED[key]


def _count(text: Mapping[str, Any]) -> LanguageModules:
    """Build the model on the meta device, run it at three lengths, and return its modules."""
    config: Any = AutoConfig.for_model(**{**text, "is_decoder": True})
    config._attn_implementation = config._experts_implementation = "eager"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = model_class(config).eval()
    # FLOPs are polynomials of lengths that are multiples of the chunks of states and of compressed keys.
    chunks = [getattr(config, name, None) or 1 for name in _CHUNK_SETTINGS]
    unit = math.lcm(_DELTA_CHUNK, *chunks, *dict(getattr(config, "compress_rates", None) or {}).values())
    counts = []
    for num_units in (1, 2, 3):
        with torch.no_grad(), _ProductCounter(model) as counter:
            model(input_ids=torch.zeros(1, num_units * unit, dtype=torch.int64, device="meta"), use_cache=False)
        counts.append(counter.flops)
    flops_by_key = {key: _fit_polynomial([flops[key] for flops in counts], unit) for key in counter.flops}
    return _language_modules(model, counter.names, flops_by_key)


def _fit_polynomial(flops: Sequence[int], unit: int) -> tuple[float, float]:
    """Return the FLOPs of a token and of a squared token, from those of samples of 1, 2 and 3 units of tokens.

    A constant is left out, such as that of padding before a convolution.
    """
    one, two, three = flops
    per_square = (three - 2 * two + one) / (2 * unit**2)
    return (two - one) / unit - 3 * unit * per_square, per_square


class _ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of matrix products on the meta device, where all experts of a token are the first expert.

    A layer that equals an earlier one is not run: it repeats that one's FLOPs and output.

    Attributes:
        flops: by name of the weight (0 without products) or, of products without weights, by layer; in order of use.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[str | int | None] = Counter()
        self.names = {_storage(parameter): name for name, parameter in model.named_parameters()}
        self._layer: int | None = None
        self._calls: dict[str, tuple[str, Any, dict[str | int | None, int]]] = {}  # the first of each kind
        for name, layer in model.named_modules():
            if re.fullmatch(r"\D*\.\d+", name):
                run = type(layer).forward.__get__(layer)
                layer.forward = partial(self._run_layer, name, repr([*map(_settings, layer.modules())]), run)

    def _run_layer(self, name: str, kind: str, run: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the layer ``name``, the first of its kind, or repeat the run of the first."""
        first, output, layer_flops = self._calls.get(kind, (name, None, {}))
        if first == name:
            before = self.flops.copy()
            output = run(*args, **kwargs)
            layer_flops = {
                key: flops - before[key]
                for key, flops in self.flops.items()
                if flops > before[key] or str(key).startswith(f"{name}.")
            }
            self._calls[kind] = name, output, layer_flops
            return output
        for key, flops in layer_flops.items():
            own_key = re.sub(rf"^{re.escape(first)}\b", name, key) if isinstance(key, str) else _layer_of(f"{name}.")
            self.flops[own_key] += flops
        return output

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return 0
        if func is aten.nonzero.default:  # of experts, the first; of the choices of tokens, all
            num_found = args[0].numel() if args[0].dim() > 1 else 1
            return args[0].new_empty((num_found, args[0].dim()), dtype=torch.int64)
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=output)
        weight = self._last_weight(args)
        if weight:
            self._layer = _layer_of(weight)
        if weight or flops:
            self.flops[weight or self._layer] += flops
        return output

    def _last_weight(self, args: Sequence[Any]) -> str:
        """Return the name of the last weight among arguments; "" for none."""
        names = [self.names.get(_storage(arg), "") for arg in args if isinstance(arg, Tensor)]
        return next((name for name in reversed(names) if name and not name.endswith(".bias")), "")


def _settings(module: nn.Module) -> list[Any]:
    """Return what tells a module from others: its class, sizes of weights, and numbers and names but its layer's."""
    settings = [item for item in vars(module).items() if isinstance(item[1], int | float | str)]
    sizes = [(name, weight.shape) for name, weight in module.named_parameters(recurse=False)]
    return [type(module), sizes, *(item for item in settings if not item[0].startswith("layer_"))]


def _storage(tensor: Tensor) -> int:
    """Return a number that tensors share if one is a view of the other, such as a weight and its transpose."""
    return int(tensor.untyped_storage()._cdata)


def _language_modules(
    model: Any, names: Mapping[int, str], flops_by_key: Mapping[str | int | None, tuple[float, float]]
) -> LanguageModules:
    """Return the modules of a model, from names by storage, and FLOPs of a token and a squared token by key."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding_weight, head_weight = (names[_storage(module.weight)] for module in (embedding, head))
    modules = [_module(model, embedding_weight, 0.0)]
    for key, (per_token, per_square) in flops_by_key.items():
        if not isinstance(key, str):
            attention = ModuleCost(name="attention", part="language model", kind="attention", layer=key)
            causal_flops = per_square / 2  # of the squares of lengths, half
            modules.append(dataclasses.replace(attention, flops_per_unit=per_token, flops_per_square=causal_flops))
        elif key not in (embedding_weight, head_weight):
            modules.append(_module(model, key, per_token))
    head_name = next(name for name, module in model.named_modules() if module is head)
    head_module = dataclasses.replace(_module(model, head_weight, flops_by_key[head_weight][0]), name=head_name)
    return LanguageModules(tuple(modules), head_module, is_tied=embedding_weight == head_weight)


def _module(model: Any, weight: str, flops_per_token: float) -> ModuleCost:
    """Describe one weight of a model: its widths, and how often a token is multiplied with it.

    Args:
        weight: a parameter's name; with three dimensions, it holds the weights of all experts of a layer.
        flops_per_token: of the products with it, for one token; 0 for norms and embeddings, which have none.
    """
    owner = model.get_submodule(weight.rpartition(".")[0])
    is_convolution = isinstance(owner, nn.Conv1d)
    shape = model.get_parameter(weight).shape or (1,)
    holds_experts = len(shape) == 3 and not is_convolution
    num_experts = shape[0] if holds_experts else 1
    outputs, inputs = math.prod(shape[:-1]) // num_experts, shape[-1]
    kind: ModuleKind = "linear" if isinstance(owner, nn.Linear) else "tensor"
    if is_convolution:
        kind = "convolution"
    if not flops_per_token:
        kind, inputs, outputs = "no_matmul", outputs, inputs

    uses_per_token = flops_per_token / (2 * inputs * outputs)
    num_zero_experts = getattr(model.config, "zero_expert_num", None)
    if num_experts > 1 and num_zero_experts:
        # Experts without weights, which are chosen as often as others if the router is balanced.
        num_routed = model.config.n_routed_experts
        uses_per_token *= num_routed / (num_routed + num_zero_experts)
    return ModuleCost(
        name=weight.removesuffix(".weight"),
        part="language model",
        kind=kind,
        inputs=inputs,
        outputs=outputs,
        uses_per_unit=uses_per_token,
        num_experts=num_experts,
        has_bias=isinstance(getattr(owner, "bias", None), Tensor),
        layer=_layer_of(weight),
    )


def _layer_of(weight: str) -> int | None:
    """Return the number of the layer in a weight's name."""
    number = re.search(r"\.(\d+)\.", weight)
    return int(number[1]) if number else None
