"""Losses made in the head are those of the logits, whatever is made at a time, and need less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from packtool.batch.batch import Batch
from packtool.batch.collate import collate_packs, collate_padded
from packtool.errors import ConfigError
from packtool.planning.cost import CostModel
from packtool.train.model.loss import HeadLoss, ReferenceModel, target_losses
from scripts._flop_counter import flop_counter
from tests.batch.reduced import mixed_samples, reduced_model, reduced_spec, save_image_processor
from tests.train.test_isolation import gradients
from tests.train.test_loss_weights import weighted


@pytest.fixture(params=["qwen3", "qwen3_vl"])
def setting(request: pytest.FixtureRequest, tmp_path: Any) -> tuple[Any, Any, list[Any]]:
    name = request.param
    if name == "qwen3_vl":
        save_image_processor(name, str(tmp_path))
    return reduced_model(name), reduced_spec(name, str(tmp_path)), mixed_samples(name)


@pytest.mark.smoke
@pytest.mark.parametrize("chunk_logits", [1, 1000, 2**26])
def test_head_losses_and_gradients_equal_those_from_logits(setting: Any, chunk_logits: int) -> None:
    model, spec, samples = setting
    batch = collate_packs(samples, spec)
    expected = gradients(model, [target_losses(model, batch, label_logits_only=False).weighted_sum()])
    head = HeadLoss(model, chunk_logits)
    head_losses = head.losses(model, batch)
    assert len(head_losses.losses) == batch.num_target_tokens
    head_gradients = gradients(model, [head_losses.weighted_sum()])
    assert head_gradients.keys() == expected.keys()
    for name, gradient in head_gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=5e-6)
    logits = model(**batch.model_inputs()).logits  # the head is itself again
    labels = batch.labels.flatten()
    assert logits.shape[-1] == spec.config.get_text_config().vocab_size
    assert torch.equal(head_losses.positions, (labels >= 0).nonzero().squeeze(1))
    assert torch.equal(
        head_losses.correct, logits.flatten(0, 1).argmax(-1)[head_losses.positions] == labels[head_losses.positions]
    )


@pytest.mark.parametrize("chunk_logits", [1, 2**26])
def test_entropies_in_the_head_equal_those_of_logits(setting: Any, chunk_logits: int) -> None:
    model, spec, samples = setting
    batch = collate_packs(samples, spec)
    expected = target_losses(model, batch, label_logits_only=False, entropy_top_k=20)
    losses = HeadLoss(model, chunk_logits).losses(model, batch, entropy_top_k=20)
    assert losses.entropies is not None
    assert expected.entropies is not None
    torch.testing.assert_close(losses.entropies, expected.entropies)
    assert not losses.entropies.requires_grad
    gradient = gradients(model, [losses.weighted_by_entropy(3.0, 1.0).weighted_sum()])
    expected_gradient = gradients(model, [expected.weighted_by_entropy(3.0, 1.0).weighted_sum()])
    for name in expected_gradient:
        torch.testing.assert_close(gradient[name], expected_gradient[name], rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("chunk_logits", [1, 2**26])
def test_divergences_from_a_reference_equal_those_of_logits(setting: Any, chunk_logits: int) -> None:
    model, spec, samples = setting
    batch = collate_packs(samples, spec)
    reference = ReferenceModel(model, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    with torch.no_grad():
        expected_logits = reference.logits(reference.target_hidden(batch))
    logits = model(**batch.model_inputs()).logits.flatten(0, 1)[batch.target_positions]
    probabilities, log_ratios = expected_logits.softmax(-1), expected_logits.log_softmax(-1) - logits.log_softmax(-1)
    divergences = (probabilities * log_ratios).sum(-1)
    labels = batch.labels.flatten()[batch.target_positions]
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    expected_sum = (losses * torch.exp(-losses.detach()) + 0.5 * divergences).sum()
    expected = gradients(model, [expected_sum])
    targets = HeadLoss(model, chunk_logits).losses(model, batch, reference=reference)
    head_sum = targets.with_divergences(0.5).weighted_sum()
    assert float(divergences.detach().max()) > 1e-4
    torch.testing.assert_close(head_sum, expected_sum)
    for name, gradient in gradients(model, [head_sum]).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=5e-6)


def test_reference_is_refused_where_logits_change_after_the_head() -> None:
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=32, hidden_size=16, num_hidden_layers=1, intermediate_size=16))
    with pytest.raises(ConfigError, match="changes its logits after the head"):
        ReferenceModel(model, torch.device("cpu"))


def test_recomputed_logits_count_as_hardware_flops() -> None:
    """As HFU counts them, if not those of a single chunk."""
    spec, counted = reduced_spec("qwen3"), []
    batch = collate_packs(mixed_samples("qwen3"), spec)
    for chunk_logits in (None, 1):
        model = reduced_model("qwen3")
        with flop_counter() as counter:
            HeadLoss(model, chunk_logits).losses(model, batch).weighted_sum().backward()  # type: ignore[no-untyped-call]
        counted.append(counter.get_total_flops())
    config = spec.config.to_dict()
    plain_flops, recomputed_flops = (
        CostModel.of_config(config, recomputes_head=does).per_target_token for does in (False, True)
    )
    assert counted[1] - counted[0] == batch.num_target_tokens * (recomputed_flops - plain_flops) > 0


def test_weights_and_padding() -> None:
    spec, samples = reduced_spec("qwen3"), [weighted(1, 9), weighted(3, 12)]
    for batch, packed in ((collate_packs(samples, spec), True), (collate_padded(samples, spec), False)):
        model = reduced_model("qwen3", packed=packed)
        expected = target_losses(model, batch, label_logits_only=False).weighted_sum()
        torch.testing.assert_close(HeadLoss(model).losses(model, batch).weighted_sum(), expected)


def test_documents_of_targets(setting: Any) -> None:
    _, spec, samples = setting
    for batch in (collate_packs(samples, spec), collate_padded(samples, spec)):
        width = batch.labels.shape[1]
        positions = (batch.labels.flatten() >= 0).nonzero().squeeze(1)
        counts = batch.documents_of(positions).bincount(minlength=len(samples))
        assert counts.tolist()[: len(samples)] == [int((sample.labels[1:] >= 0).sum()) for sample in samples]
        assert width == batch.input_ids.shape[1]
        assert len(batch.channels) == (len(batch.lengths) if hasattr(batch, "lengths") else len(batch.labels))


def test_without_targets_every_gradient_is_zero(setting: Any) -> None:
    model, spec, _ = setting
    head_losses = HeadLoss(model).losses(model, collate_packs([], spec))
    loss = head_losses.weighted_sum()
    assert loss.item() == 0.0
    reached = gradients(model, [loss])
    assert reached.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in reached.values())


def saved_logits(model: Any, batch: Batch, chunk_logits: int) -> int:
    """Logits that are kept from forward to backward."""
    saved, vocabulary = 0, model.config.vocab_size

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        if tensor.shape in ((batch.num_target_tokens, vocabulary), (chunk_logits // vocabulary, vocabulary)):
            saved += tensor.numel()
        return tensor

    head = HeadLoss(model, chunk_logits)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = head.losses(model, batch).weighted_sum()
    loss.backward()
    return saved


def test_logits_are_not_stored_for_the_backward_pass() -> None:
    samples = [weighted(seed, 60) for seed in range(8)]
    batch = collate_packs(samples, reduced_spec("qwen3"))
    vocabulary = reduced_spec("qwen3").config.vocab_size
    assert saved_logits(reduced_model("qwen3"), batch, 2**26) >= batch.num_target_tokens * vocabulary
    assert saved_logits(reduced_model("qwen3"), batch, 10 * vocabulary) == 0


def test_models_that_change_their_logits_keep_their_head() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=32, num_key_value_heads=1, head_dim=8, **sizes))
    assert model.config.final_logit_softcapping
    assert not HeadLoss.applies_to(model)
    assert HeadLoss.applies_to(reduced_model("qwen3"))
    assert not HeadLoss.applies_to(nn.Linear(1, 1))


def test_correct_predictions_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass makes logits again, and does not look for the largest again."""
    batch = collate_packs([weighted(seed, 60) for seed in range(4)], reduced_spec("qwen3"))
    model = reduced_model("qwen3")
    head = HeadLoss(model, 10 * reduced_spec("qwen3").config.vocab_size)
    calls: list[int] = []
    argmax = torch.Tensor.argmax
    monkeypatch.setattr(torch.Tensor, "argmax", lambda *arguments: calls.append(1) or argmax(*arguments))
    loss = head.losses(model, batch).weighted_sum()
    num_calls = len(calls)
    assert num_calls == -(-batch.num_target_tokens // 10)
    loss.backward()
    assert len(calls) == num_calls
