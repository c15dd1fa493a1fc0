"""Layers that are compiled compute what they did, and are compiled for lengths, not for micro-batches: every family."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from transformers import Qwen3Config, Qwen3ForCausalLM

from packtool.attention.register import set_attention
from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.encode.families import MediaLimits
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.train.model.compiled import check_backend, compile_layers
from packtool.train.model.load import auto_class
from packtool.train.model.loss import LossFunction
from packtool.train.model.trainable import enable_checkpointing
from tests.batch.reduced import make_sample, reduced_config
from tests.train.real_models import ON_TEXT, THAT_HEAR, THAT_SEE, config_of

STEP = 32
# Of one length when padded, with other boundaries; and of two lengths.
PACKS = ((9, 17, 5), (3, 3, 20, 1))
TWO_LENGTHS = ((9, 17, 5), (12, 30), (3, 3, 20, 1))


@pytest.fixture(autouse=True)
def _fresh_compilation() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(spec: InputSpec) -> Any:
    """In float32, with weights large enough that every token matters."""
    torch.manual_seed(0)
    model = auto_class(spec.config).from_config(copy.deepcopy(spec.config), attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.08)
    set_attention(model)
    return model.train()


def step_of(
    model: Any, spec: InputSpec, lengths: Sequence[int], pad_to_multiple_of: int = 1
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a pack."""
    samples = [make_sample(length, seed=length) for length in lengths]
    batch = collate_packs(samples, spec, frozenset(), pad_to_multiple_of=pad_to_multiple_of)
    model.zero_grad()
    with LossFunction.temporary(model) as loss_function:
        loss = loss_function(model, batch).weighted_sum()
        loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def check_compiled(model: Any, spec: InputSpec, backend: str, packs: Sequence[Sequence[int]] = PACKS) -> None:
    """Padded and compiled as alone, and nothing is compiled for a length that was there before."""
    expected = [step_of(model, spec, lengths) for lengths in packs]
    num_layers = compile_layers(model, backend)
    compilations = []
    for lengths, (loss, gradients) in zip(packs, expected, strict=True):
        compiled_loss, others = step_of(model, spec, lengths, STEP)
        torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-5)
        assert len(gradients) == len(others) > num_layers
        largest = max(float(gradient.abs().max()) for gradient in gradients)
        for gradient, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(other, gradient, rtol=0, atol=1e-5 * largest)
        compilations.append(counters["stats"]["unique_graphs"])
    first_count, *later = compilations
    in_all = first_count * len({-(-sum(lengths) // STEP) for lengths in packs})
    assert 0 < first_count <= max(later) <= in_all
    assert later == [max(later)] * len(later)


@pytest.mark.parametrize("name", [*ON_TEXT, *THAT_SEE, *THAT_HEAR])
def test_every_family(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    drawn_data = request.getfixturevalue("drawn_data") if name in THAT_HEAR else tmp_path
    spec = InputSpec(str(tmp_path), config_of(name, drawn_data, tmp_path), MediaLimits())
    check_compiled(model_of(spec), spec, "eager")


@pytest.mark.parametrize("adapters", [False, True])
def test_with_compiled_autograd(adapters: bool) -> None:
    """Forward and backward as graphs, recomputed; with adapters, too, whose first layer's input has no gradient."""
    spec = InputSpec("", reduced_config("qwen3"), MediaLimits())
    model = model_of(spec)
    enable_checkpointing(model)
    if adapters:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "down_proj"], r=4))
    check_compiled(model, spec, "aot_eager", TWO_LENGTHS if adapters else PACKS)


def test_checkpointing_is_not_compiled() -> None:
    """Once forward and once backward in each layer: neither left out, nor done twice."""
    spec = InputSpec("", reduced_config("qwen3"), MediaLimits())
    model = model_of(spec)
    enable_checkpointing(model)
    calls: list[int] = []
    for layer in model.get_decoder().layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    compile_layers(model, "eager")
    step_of(model, spec, PACKS[0], STEP)
    assert len(calls) == 2 * spec.config.num_hidden_layers


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor makes kernels for the CPU with a C++ compiler")
def test_kernels_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    # Programs that try each kind of vector instruction take as long to compile as the kernels.
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", True)
    # Processes that compile import torch first.
    monkeypatch.setattr(inductor, "compile_threads", 1)
    spec = InputSpec("", reduced_config("qwen3"), MediaLimits())
    model = model_of(spec)
    loss, _ = step_of(model, spec, PACKS[0])
    compile_layers(model, "inductor")
    compiled_loss, _ = step_of(model, spec, PACKS[0], STEP)
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-5)


def test_evaluation_is_not_compiled() -> None:
    spec = InputSpec("", reduced_config("qwen3"), MediaLimits())
    model = model_of(spec)
    compile_layers(model, "eager")
    model.eval()
    step_of(model, spec, PACKS[0])
    assert not counters["stats"]


def test_compiled_models_keep_copies_and_names() -> None:
    spec = InputSpec("", reduced_config("qwen3"), MediaLimits())
    model = model_of(spec)
    names, kind = list(model.state_dict()), type(model.get_decoder().layers[0])
    compile_layers(model, "eager")
    copied = copy.deepcopy(model)
    layer = copied.get_decoder().layers[0]
    assert list(copied.state_dict()) == names
    assert isinstance(layer, kind)
    assert type(layer).__name__ == kind.__name__
    nn.init.zeros_(copied.get_decoder().layers[1].mlp.down_proj.weight)
    assert not torch.equal(step_of(copied, spec, PACKS[0])[0], step_of(model, spec, PACKS[0])[0])


def test_unsupported_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_backend("eager", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"no such backend; did you mean 'inductor'\?"):
        check_backend("inducter", torch.device("cpu"))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("No working C++ compiler found\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", broken)
        with pytest.raises(
            ConfigError, match=r"does not work on this machine: RuntimeError: No working C\+\+"
        ) as raised:
            check_backend("inductor", torch.device("cpu"))
        assert "and more" not in str(raised.value)
    model: Any = Qwen3ForCausalLM(Qwen3Config(**reduced_config("qwen3").to_dict()))
    del model.model.layers
    with pytest.raises(UnsupportedModelError, match="cannot find the layers of a"):
        compile_layers(model, "eager")
