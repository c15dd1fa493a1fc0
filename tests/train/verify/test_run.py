"""Checks of packed samples: models that isolate samples pass, and models that leak fail every check."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

import packtool.attention.recurrent as recurrent
import packtool.train.model.loss as loss_module
import packtool.train.verify.checks as checks_module
from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Varlen
from packtool.attention.register import ATTENTION_NAME, set_attention
from packtool.attention.support import refuse_leaky_inputs
from packtool.batch.batch import TreeBatch
from packtool.batch.collate import collate_packs
from packtool.batch.prefix_tree import key_index
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.config.commands import VerifyConfig
from packtool.encode.families import MediaLimits
from packtool.errors import ConfigError, DataError, MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.model.loss import LossFunction
from packtool.train.prepare.run import Run
from packtool.train.run import train
from packtool.train.verify.checks import (
    Check,
    PackUnderTest,
    check_gradients,
    check_isolation,
    check_logits,
    check_loss,
    check_prefixes,
    raise_if_failed,
    shortest_samples,
    verify_before_training,
    verify_cheaply,
    worst_of,
)
from packtool.train.verify.run import choose_packs, verify
from tests.attention.hybrids import hybrid_config, hybrid_model
from tests.batch.reduced import (
    TEXT_MODELS,
    VISION_MODELS,
    make_sample,
    mixed_samples,
    reduced_model,
    reduced_spec,
    samples_with_prefixes,
    save_image_processor,
)
from tests.train.alike import make_alike_world
from tests.train.tiny import TinyWorld

torch.set_num_threads(1)


def config(tiny: TinyWorld, **settings: Any) -> VerifyConfig:
    defaults: dict[str, Any] = {"model": tiny.model, "cached_dataset": (tiny.cache,), "packing_length": 256}
    return VerifyConfig(**defaults | settings)


@pytest.fixture
def leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed attention that ignores sample boundaries."""
    attend = KERNELS["sdpa"].attend

    def leak(q: Any, k: Any, v: Any, varlen: Varlen, **kwargs: Any) -> Any:
        return attend(q, k, v, Varlen.of_lengths([len(q)]), **kwargs)

    monkeypatch.setattr(KERNELS["sdpa"], "attend", leak)


@pytest.mark.smoke
def test_a_model_that_isolates_passes(tiny: TinyWorld) -> None:
    report = verify(config(tiny))
    assert report.passed
    assert [check.name for check in report.checks] == ["isolation", "logits", "loss", "gradients"]
    assert (report.device, report.dtype, report.attention) == ("cpu", "float32", "sdpa")
    assert report.num_packs == 2
    assert report.num_samples > 4
    errors = {check.name: check.error for check in report.checks}
    assert errors["isolation"] == 0
    assert errors["logits"] < 5e-6
    assert errors["loss"] < 2e-6
    assert errors["gradients"] < 1e-4
    report.raise_if_failed()


def test_a_model_that_isolates_passes_in_16_bits(tiny: TinyWorld) -> None:
    report = verify(config(tiny, torch_dtype="bfloat16", num_packs=1, packing_length=128))
    assert report.passed
    assert report.dtype == "bfloat16"
    assert report.checks[1].allowed > 1e-2


@pytest.mark.usefixtures("leaking")
def test_every_check_detects_a_leak(tiny: TinyWorld) -> None:
    report = verify(config(tiny, num_packs=1))
    assert not report.passed
    assert [check.passed for check in report.checks] == [False] * 4
    assert all(check.excess > 100 for check in report.checks)
    leak = r"leak: changing sample 0 \(.*row \d+\) changes the logits of sample \d"
    with pytest.raises(MismatchError, match=leak) as error:
        report.raise_if_failed()
    assert error.value.remedy


def test_packs_have_two_samples_and_the_first_has_media(tiny: TinyWorld) -> None:
    reader = CacheReader.open([tiny.cache])
    for seed in range(5):
        packs = choose_packs(reader, config(tiny, seed=seed, num_packs=3))
        assert len(packs) == 3
        assert all(len(positions) > 1 for positions in packs)
        assert all(reader.index.length[positions].sum() <= 256 for positions in packs)
        assert reader.index.num_images[packs[0]].any()
        assert len(np.unique(np.concatenate(packs))) == sum(map(len, packs))
    with pytest.raises(ConfigError, match="no two samples share a pack"):
        choose_packs(reader, config(tiny, packing_length=int(reader.index.length.min()) + 1))
    with pytest.raises(DataError, match="the shortest sample has"):
        choose_packs(reader, config(tiny, packing_length=2))


def test_a_missing_kernel_is_reported_before_the_model_is_loaded(tiny: TinyWorld, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"--attn-impl varlen: .*CUDA"):
        verify(config(tiny, attn_impl="varlen"))


@pytest.fixture(params=[TEXT_MODELS[0], VISION_MODELS[-1]])
def reduced(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    name = request.param
    if name in VISION_MODELS:
        save_image_processor(name, str(tmp_path))
    return reduced_model(name), mixed_samples(name), reduced_spec(name, str(tmp_path))


def test_cheap_checks_do_not_change_the_model(reduced: Any) -> None:
    model, samples, spec = reduced
    model.train()
    model.model.eval()  # such as a frozen part
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    checks = verify_cheaply(model, samples, spec)
    assert [check.name for check in checks] == ["isolation", "loss"]
    raise_if_failed(checks)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.get_text_config()._attn_implementation == ATTENTION_NAME
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.usefixtures("leaking")
def test_cheap_checks_detect_a_leak(reduced: Any) -> None:
    model, samples, spec = reduced
    with pytest.raises(MismatchError, match="packed samples leak"):
        raise_if_failed(verify_cheaply(model, samples, spec))


def test_cheap_checks_with_adapters_and_mixed_precision(reduced: Any) -> None:
    model, samples, spec = reduced
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    raise_if_failed(verify_cheaply(adapted, samples, spec))
    checks = verify_cheaply(adapted, samples, spec, dtype=torch.bfloat16)
    raise_if_failed(checks)
    assert checks[0].allowed > 1e-3
    assert model.config.get_text_config()._attn_implementation == ATTENTION_NAME


def test_a_run_with_leaking_packs_does_not_start(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "packtool.train.verify.checks.verify_cheaply", lambda *args, **kwargs: [Check("loss", 1.0, 0.1, "")]
    )
    with pytest.raises(MismatchError, match="the loss of a pack differs from its samples alone") as exc_info:
        train(tiny.config(tmp_path, verify_packing=True), SilentProgress())
    assert "--packing false" in str(exc_info.value)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("settings", "compares"), [({"qat": "int4"}, False), ({"fp8": True}, False), ({}, True)])
def test_losses_are_not_compared_if_layers_round_to_few_bits(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], compares: bool
) -> None:
    """Rounding enlarges the differences of kernels; seen on a GPU in bfloat16."""
    calls: list[Any] = []
    monkeypatch.setattr(checks_module, "verify_cheaply", lambda *args, **kwargs: calls.append(kwargs) or [])
    run = Run.of(tiny.config(tmp_path, train_type="full", verify_packing=True, **settings), World())
    model, spec = reduced_model("qwen2"), reduced_spec("qwen2", tiny.model)
    verify_before_training(run, model, spec, None, SilentProgress())
    assert [call["compares_losses"] for call in calls] == [compares]


@pytest.mark.usefixtures("leaking")
def test_isolation_alone_detects_a_leak(reduced: Any) -> None:
    model, samples, spec = reduced
    checks = verify_cheaply(model, samples, spec, compares_losses=False)
    assert [(check.name, check.passed) for check in checks] == [("isolation", False)]


def test_a_leaking_recurrent_layer_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hybrid model passes, unless the state of its recurrent layers runs across sample boundaries."""
    spec = InputSpec("", hybrid_config("qwen3_next"), MediaLimits(None))
    samples = [make_sample(length, seed=length) for length in (9, 5, 12)]
    model = hybrid_model("qwen3_next")
    set_attention(model)
    raise_if_failed(verify_cheaply(model, samples, spec))
    monkeypatch.setattr(recurrent, "_run_each_document", lambda forward, hidden, varlen: forward(hidden))
    checks = verify_cheaply(model, samples, spec)
    assert [check.passed for check in checks] == [False, False]


def test_a_leak_between_images_is_detected(tmp_path: Any) -> None:
    """Here the features of every image contain a part of all others."""
    name = "qwen3_vl"
    save_image_processor(name, str(tmp_path))
    model, samples, spec = reduced_model(name), mixed_samples(name), reduced_spec(name, str(tmp_path))
    tower = model.model.visual
    real = tower.forward

    def mixing(pixels: Any, **kwargs: Any) -> Any:
        return real(pixels + pixels.mean(0), **kwargs)

    tower.forward = mixing
    assert not check_isolation(PackUnderTest(model, samples, spec, torch.float32)).passed


@pytest.fixture(params=[*TEXT_MODELS, *VISION_MODELS])
def tree(request: pytest.FixtureRequest, tmp_path: Any) -> PackUnderTest:
    """Samples with shared prefixes, each prefix computed once."""
    name = request.param
    if name in VISION_MODELS:
        save_image_processor(name, str(tmp_path))
    spec = reduced_spec(name, str(tmp_path))
    return PackUnderTest(reduced_model(name), samples_with_prefixes(name), spec, torch.float32, min_shared=1)


def test_a_tree_is_compared_with_each_of_its_samples(tree: PackUnderTest) -> None:
    assert isinstance(tree.batch, TreeBatch)
    checks = [check(tree, 7) for check in (check_isolation, check_prefixes, check_gradients)]
    checks += [check_logits(tree), check_loss(tree)]
    raise_if_failed(checks)
    assert checks[0].error == 0.0
    assert checks[1].error < 1e-5
    for node in tree.nodes:
        changed = tree.with_change(node)
        assert 0 < int((changed.input_ids != tree.batch.input_ids).sum()) <= node.length


def test_identical_samples_pass() -> None:
    """There is nothing to leak between them, and their shared prefix is compared with each alone."""
    model, spec, sample = reduced_model("qwen3"), reduced_spec("qwen3"), make_sample(20, seed=1)
    checks = verify_cheaply(model, [sample, sample], spec, min_shared=1)
    assert [check.name for check in checks] == ["isolation", "loss", "prefixes"]
    raise_if_failed(checks, shares_prefixes=True)


def test_packs_that_share_prefixes_are_verified(tiny: TinyWorld, tmp_path: Path, monkeypatch: Any) -> None:
    alike_world = make_alike_world(tiny, tmp_path)
    report = verify(config(alike_world, num_packs=1))
    assert [check.name for check in report.checks] == ["isolation", "prefixes", "logits", "loss", "gradients"]
    assert report.passed
    assert report.checks[0].error == 0
    assert report.checks[1].error < 1e-5
    assert 0 < report.num_shared_tokens < report.num_tokens
    unshared_report = verify(config(alike_world, num_packs=1, share_prefix="false"))
    assert unshared_report.num_shared_tokens == 0
    assert [check.name for check in unshared_report.checks] == ["isolation", "logits", "loss", "gradients"]
    monkeypatch.setattr("packtool.batch.collate.key_index", _with_the_node_before)
    monkeypatch.setattr("packtool.train.verify.run.refuse_leaky_inputs", lambda inputs: None)
    with pytest.raises(MismatchError, match="packed samples leak") as error:
        verify(config(alike_world, num_packs=1)).raise_if_failed()
    assert "--share-prefix false" in str(error.value)


def test_samples_without_shared_prefixes_keep_their_order() -> None:
    """The search for shared prefixes groups samples by channel, and the batch does not."""
    samples = [
        dataclasses.replace(make_sample(length, seed=length), channel=channel)
        for length, channel in ((9, "a"), (17, "b"), (5, "a"), (12, None))
    ]
    pack = PackUnderTest(reduced_model("qwen3"), samples, reduced_spec("qwen3"), torch.float32, min_shared=64)
    assert not isinstance(pack.batch, TreeBatch)
    assert check_isolation(pack).error == 0.0


def test_a_leak_between_branches_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch also sees the keys of the branch before it."""
    monkeypatch.setattr("packtool.batch.collate.key_index", _with_the_node_before)
    spec = reduced_spec("qwen3")
    tree = PackUnderTest(reduced_model("qwen3"), samples_with_prefixes("qwen3"), spec, torch.float32, min_shared=1)
    functions = (check_isolation, check_prefixes, check_logits, check_loss, check_gradients)
    assert not any(check(tree).passed for check in functions)
    with pytest.raises(MismatchError, match="do not count from 0"):
        refuse_leaky_inputs(tree.batch.model_inputs())


def _with_the_node_before(parents: list[int], lengths: Any) -> Any:
    index, key_lengths = key_index(parents, lengths)
    parts = np.split(index, np.cumsum(key_lengths)[:-1])
    parts[2:] = [np.concatenate(pair) for pair in itertools.pairwise(parts[1:])]
    return np.concatenate(parts), tuple(map(len, parts))


def test_a_model_that_ignores_its_input_is_refused(reduced: Any) -> None:
    model, samples, spec = reduced
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(MismatchError, match="nothing can be verified"):
        verify_cheaply(model, samples, spec)


def test_nan_fails() -> None:
    fine, lost = Check("loss", 0.1, 0.2, "here"), Check("loss", float("nan"), 0.2, "there")
    assert fine.passed
    assert not lost.passed
    assert worst_of([fine, lost, dataclasses.replace(fine, name="logits")]) == [
        lost,
        dataclasses.replace(fine, name="logits"),
    ]


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor had that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_cheap_checks_need_less_memory_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computing the logits of all targets at once would need ten times the memory of a step."""
    vocab_size = 2000
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 200 * vocab_size)
    model, spec = reduced_model("qwen2"), reduced_spec("qwen2")
    model.resize_token_embeddings(vocab_size)
    samples = [make_sample(num_tokens, seed=num_tokens) for num_tokens in (300, 310, 320, 330)]
    num_targets = sum(int((sample.labels != -100).sum()) for sample in samples)
    with Largest() as in_check:
        raise_if_failed(verify_cheaply(model, samples, spec))
    with LossFunction.temporary(model) as loss_function, Largest() as in_step:
        assert loss_function.head_loss is not None
        loss_function(model, collate_packs(samples, spec)).weighted_sum().backward()
    assert in_check.numel <= in_step.numel < num_targets * vocab_size


def test_cheap_checks_use_few_tokens() -> None:
    samples = [make_sample(num_tokens, seed=num_tokens) for num_tokens in (30, 10, 40, 20)]
    assert [sample.length for sample in shortest_samples(samples, 60)] == [30, 10, 20]
    assert [sample.length for sample in shortest_samples(samples, 59)] == [10, 20]
    assert [sample.length for sample in shortest_samples(samples, 1)] == [10, 20]
    assert shortest_samples(samples, 1000) == samples
    assert shortest_samples(samples[:1], 1) == samples[:1]
