"""Hybrids are packed right where no kernel honours boundaries: every document starts with an empty state."""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

import packtool.attention.recurrent as recurrent
from packtool.attention.kernel import LeakError, Varlen
from packtool.attention.recurrent import keeps_documents_apart, recurrent_layers
from packtool.attention.register import original_attention, set_attention
from packtool.batch.batch import PackedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.prefix_tree import ROOT, key_index
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.families import MediaLimits
from packtool.train.model.loss import target_losses
from packtool.train.model.trainable import enable_checkpointing
from tests.attention.hybrids import HYBRIDS, hybrid_config, hybrid_model
from tests.batch.reduced import make_sample, prefix_samples, reduced_limits, save_image_processor

torch.set_num_threads(1)
Setting = tuple[PreTrainedModel, InputSpec, list[EncodedSample]]


@pytest.fixture(scope="module", params=HYBRIDS)
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    name = request.param
    config, directory = hybrid_config(name), ""
    limits = reduced_limits(config)
    if limits is not None:
        directory = str(tmp_path_factory.mktemp(name))
        save_image_processor("qwen3_vl", directory)
    # Longer than a chunk of 64, shorter, and than the convolution.
    samples = [make_sample(length, seed=length) for length in (70, 1, 9, 2)]
    if limits is not None:
        samples.insert(1, make_sample(7, ((40, 32),), seed=1, limits=limits))
    return hybrid_model(name), InputSpec(directory, config, MediaLimits(limits)), samples


@pytest.fixture(autouse=True)
def _isolated(setting: Setting) -> None:
    set_attention(setting[0])


@torch.no_grad()
def logits_of(model: PreTrainedModel, spec: InputSpec, samples: list[EncodedSample]) -> list[Tensor]:
    batch = collate_packs(samples, spec)
    return list(model(**batch.model_inputs()).logits[0].split(batch.lengths))[: len(samples)]


def test_packed_logits_equal_those_of_single_samples(setting: Setting) -> None:
    """Their own by transformers' code alone: its attention, its recurrence, no boundaries."""
    model, spec, samples = setting
    for sample, packed in zip(samples, logits_of(model, spec, samples), strict=True):
        inputs = collate_packs([sample], spec).model_inputs()
        plain = {name: inputs[name] for name in ("input_ids", "pixel_values", "image_grid_thw") if name in inputs}
        if sample.images:
            plain["mm_token_type_ids"] = (plain["input_ids"] == spec.pad_ids["image"]).int()
        elif spec.has_vision:
            plain["input_ids"] = plain["input_ids"][:, : sample.length]
            plain = {"input_ids": plain["input_ids"]}
        with original_attention(model), torch.no_grad():
            expected = model(**plain).logits[0]
        torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)


def test_changed_sample_does_not_affect_others(setting: Setting) -> None:
    model, spec, samples = setting
    before = logits_of(model, spec, samples)
    for changed in range(len(samples)):
        ids = samples[changed].input_ids
        altered = dataclasses.replace(samples[changed], input_ids=((ids + 7 * (ids < 80)).astype("int32")))
        after = logits_of(model, spec, [*samples[:changed], altered, *samples[changed + 1 :]])
        moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
        assert moved == [index == changed for index in range(len(samples))]


def test_gradients_of_the_pack_are_the_sum_over_its_samples(setting: Setting) -> None:
    model, spec, samples = setting

    def gradients(packs: list[list[EncodedSample]]) -> dict[str, Tensor]:
        model.zero_grad()
        for pack in packs:
            target_losses(model, collate_packs(pack, spec), label_logits_only=True).weighted_sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    packed, unpacked = gradients([samples]), gradients([[sample] for sample in samples])
    assert packed.keys() == unpacked.keys()
    assert any("linear_attn.conv1d" in name for name in packed)
    for name, gradient in packed.items():
        torch.testing.assert_close(
            gradient, unpacked[name], rtol=1e-4, atol=5e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_packing_leaks_without_isolation(setting: Setting) -> None:
    """The check itself is checked: transformers' own layers, asked without boundaries, do move."""
    model = setting[0]
    layer = recurrent_layers(model)[0]
    with original_attention(model), torch.no_grad():
        hidden = torch.randn(1, 20, 32)
        changed = torch.cat([torch.randn(1, 8, 32), hidden[:, 8:]], dim=1)
        assert float((layer(hidden)[:, 8:] - layer(changed)[:, 8:]).abs().max()) > 1e-3


def test_copies_are_isolated_with_their_own_weights(setting: Setting) -> None:
    model, spec, samples = setting
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer in recurrent_layers(copied):
            layer.out_proj.weight.zero_()
    before = logits_of(model, spec, samples)
    assert not torch.equal(before[0], logits_of(copied, spec, samples)[0])
    assert torch.equal(before[0], logits_of(model, spec, samples)[0])
    assert copied.state_dict().keys() == model.state_dict().keys()


def test_gradient_checkpointing_keeps_the_results(setting: Setting) -> None:
    model, spec, samples = setting
    batch = collate_packs(samples, spec)
    losses = []
    for enabled in (False, True):
        model.train()
        if enabled:
            enable_checkpointing(model)
        model.zero_grad()
        loss = target_losses(model, batch, label_logits_only=True).weighted_sum()
        loss.backward()
        losses.append((loss.item(), recurrent_layers(model)[0].conv1d.weight.grad.norm().item()))
    model.eval()  # which switches it off
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seq_lens_q": None}, "without cu_seq_lens_q"),
        ({"cache_params": object()}, "cache"),
        ({"attention_mask": torch.ones(1, 6)}, "given a mask"),
        ({"hidden_states": torch.zeros(2, 6, 32)}, "2 sequences"),
    ],
)
def test_leaking_calls_are_refused(setting: Setting, changes: dict[str, Any], message: str) -> None:
    layer_inputs: dict[str, Any] = {"hidden_states": torch.zeros(1, 6, 32), "max_length_q": 4}
    layer_inputs["cu_seq_lens_q"] = torch.tensor([0, 4, 6], dtype=torch.int32)
    layer = recurrent_layers(setting[0])[0]
    assert layer(**layer_inputs).shape == (1, 6, 32)
    with pytest.raises(LeakError, match=message):
        layer(**layer_inputs | changes)


class Recurrence(nn.Module):
    """A running mean that honours boundaries as far as its class says."""

    honours_state = honours_convolution = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        length = hidden_states.shape[1]
        bounds = kwargs.get("cu_seq_lens_q") if self.honours_state else None
        bounds = [0, length] if bounds is None else bounds.tolist()
        pieces = [hidden_states[:, a:b].cumsum(1) for a, b in pairwise(bounds)]
        before = torch.cat([torch.zeros_like(hidden_states[:, :1]), hidden_states[:, :-1]], dim=1)
        numbers = kwargs.get("seq_idx") if self.honours_convolution else None
        if numbers is not None:
            same = torch.cat([torch.zeros_like(numbers[:, :1]), numbers.diff() == 0], dim=1)
            before = before * same.unsqueeze(-1)
        return self.weight * (torch.cat(pieces, dim=1) + before)


class LeakingState(Recurrence):
    honours_state = False


class LeakingConvolution(Recurrence):
    honours_convolution = False


class Raising(Recurrence):
    def forward(self, hidden_states: Tensor, cache_params: Any = None, **kwargs: Any) -> Tensor:
        if "cu_seq_lens_q" in kwargs:
            raise ValueError("can't keep packed sequences apart")
        return super().forward(hidden_states)


@pytest.mark.parametrize(
    ("layer_class", "honours"),
    [(Recurrence, True), (LeakingState, False), (LeakingConvolution, False), (Raising, False)],
)
def test_layer_isolation_is_checked_by_running_it(
    layer_class: type[Recurrence], honours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels that heed both boundaries there is one call for all documents, else one for each."""
    monkeypatch.setattr(recurrent, "_ISOLATED_CLASSES", {layer_class.__name__})
    layer, calls = layer_class(), []
    state = torch.get_rng_state()
    assert keeps_documents_apart(layer, torch.zeros(1, 3)) is honours
    assert torch.equal(torch.get_rng_state(), state)
    recurrent.isolate_recurrent_layers(layer)
    real = layer_class.forward
    monkeypatch.setattr(layer_class, "forward", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    hidden = torch.randn(1, 9, 3)
    bounds = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    out = layer(hidden, cu_seq_lens_q=bounds, max_length_q=5)
    assert len(calls) == (1 if honours else 2)
    expected = torch.cat([real(layer, hidden[:, :4]), real(layer, hidden[:, 4:])], dim=1)
    torch.testing.assert_close(out, expected)


@pytest.fixture
def _only_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' code, which computes parts in float32, compute all of them in float64."""
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.usefixtures("_only_float64")
@pytest.mark.parametrize("continues", [True, False], ids=["states", "complete prefixes"])
def test_tree_losses_and_gradients_equal_those_of_single_samples(
    continues: bool, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of trees of two levels, with pictures; from the states of prefixes, or where a layer cannot continue them."""
    if not continues:
        monkeypatch.setattr(recurrent, "_continues_states", lambda *_: False)
    model, spec = copy.deepcopy(setting[0]).double(), setting[1]
    model.set_experts_implementation("eager")  # grouped products have no float64
    samples = prefix_samples(reduced_limits(spec.config))
    batch = collate_tree(samples, spec, min_shared=1)
    assert isinstance(batch, TreeBatch)
    assert batch.input_ids.shape[1] < sum(sample.length for sample in samples)

    def loss_and_gradients(batches: list[PackedBatch]) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        losses = [target_losses(model, each, label_logits_only=True).weighted_sum() for each in batches]
        for loss in losses:
            loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return sum(float(loss.detach()) for loss in losses), found

    loss, gradients = loss_and_gradients([batch])
    expected_loss, expected = loss_and_gradients([collate_packs([sample], spec) for sample in samples])
    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        tolerance = 1e-9 * max(float(expected[name].abs().max()), 1.0)
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: n + text)


@pytest.mark.usefixtures("_only_float64")
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_documents_of_any_tree_equal_their_paths_alone(setting: Setting, data: st.DataObject) -> None:
    """One layer, in float64: outputs, and gradients of inputs and weights; documents of one token among them."""
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 65, 130]), min_size=1, max_size=6))
    parents = [data.draw(st.integers(ROOT, number - 1)) for number in range(len(lengths))]
    layer = copy.deepcopy(recurrent_layers(setting[0])[-1]).double()
    generator = torch.Generator().manual_seed(sum(lengths))
    hidden = torch.randn(1, sum(lengths), 32, generator=generator, dtype=torch.float64, requires_grad=True)
    above = torch.randn(1, sum(lengths), 32, generator=generator, dtype=torch.float64)
    varlen = Varlen.of_lengths(lengths)
    keys, key_lengths = key_index(parents, lengths)
    out = layer(
        hidden,
        cu_seq_lens_q=varlen.cu_seqlens,
        max_length_q=varlen.max_seqlen,
        document_lengths=tuple(lengths),
        key_index=torch.from_numpy(keys),
        document_parents=tuple(parents),
    )
    paths = torch.split(hidden[0, torch.from_numpy(keys)], list(key_lengths))
    alone = [type(layer).forward(layer, path[None])[:, -own:] for path, own in zip(paths, lengths, strict=True)]
    expected = torch.cat(alone, dim=1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)
    inputs = [hidden, *layer.parameters()]
    gradients, expected_gradients = (torch.autograd.grad((each * above).sum(), inputs) for each in (out, expected))
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-10)
