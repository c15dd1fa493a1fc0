"""A packed forward pass and its loss never make the host wait for the device: every family, on CUDA that is not there.

Under ``FakeTensorMode`` tensors lie on a device ``cuda`` without one, and whatever needs a value on the host
(``.item``, ``.tolist``, ``nonzero``, ``repeat_interleave`` without a size, a boolean index) raises. Devices and dtypes
that do not go together raise too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from packtool.attention.register import set_attention
from packtool.batch.batch import PackedBatch, target_positions
from packtool.batch.spec import InputSpec, auto_class
from packtool.batch.tower_inputs import tower_inputs
from packtool.config.train import OnNan
from packtool.encode.families import MediaLimits
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.loop.watch import StepWatch, StopSignals
from packtool.train.model.loss import HeadLoss
from tests.train.real_models import (
    ADAPTED,
    ON_TEXT,
    THAT_HEAR,
    THAT_SEE,
    config_of,
    has_experts,
    traces_float32_experts,
)


def media_of(spec: InputSpec) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Two pictures, a video and two sounds, as far as the model takes them, and how many tokens stand for each kind."""
    if not spec.has_vision:
        return {}, {}
    merged = spec.config.vision_config.spatial_merge_size**2
    grids = {"image": torch.tensor([[1, 4, 6], [1, 8, 4]]), "video": torch.tensor([[3, 4, 4]])}
    patches = {kind: int(grid.prod(1).sum()) for kind, grid in grids.items()}
    media = {
        "pixel_values": torch.zeros(patches["image"], spec.patch_dim),
        "image_grid_thw": grids["image"],
        "pixel_values_videos": torch.zeros(patches["video"], spec.patch_dim),
        "video_grid_thw": grids["video"],
    }
    tokens = {kind: num_patches // merged for kind, num_patches in patches.items()}
    if spec.has_audio:
        mask = torch.zeros(2, 200, dtype=torch.int64)
        mask[0], mask[1, :132] = 1, 1
        media |= {"input_features": torch.zeros(2, spec.num_mel_bins, 200), "feature_attention_mask": mask}
        tokens["audio"] = 26 + 17 if spec.config.model_type.startswith("qwen3") else 50 + 33
    return media, tokens


def batch_for(spec: InputSpec) -> PackedBatch:
    """Three documents."""
    media, tokens = media_of(spec)
    ids = [5] * 9
    for kind, num_tokens in tokens.items():
        ids += [spec.pad_ids[kind]] * num_tokens + [7] * 4
    input_ids = torch.tensor([ids])
    positions = torch.arange(len(ids)).view(1, -1)
    labels = torch.where(positions > len(ids) // 2, input_ids, -100)
    lengths = (4, 5, len(ids) - 9) if len(ids) > 9 else (4, 5)
    return PackedBatch(
        input_ids=input_ids,
        labels=labels,
        position_ids=positions[None].expand(4, 1, -1) if spec.has_vision else positions,
        media=media,
        towers=tower_inputs(spec, media, input_ids),
        target_positions=target_positions(labels),
        loss_weights=torch.ones(1, len(ids)),
        channels=(None,) * len(lengths),
        num_samples=len(lengths),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        lengths=lengths,
    )


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """A Hopper GPU that holds shapes and no numbers."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    # Autograd makes its threads at its first backward pass, for this device, too, if it knows of it by then; and a
    # process that has them cannot be forked by the tests of other files.
    torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        yield mode


def loss_of(mode: FakeTensorMode, spec: InputSpec, batch: PackedBatch, *, adapters: bool) -> Tensor:
    """The loss of a forward pass in training, in bf16 by autocast."""
    with torch.device("meta"):
        model: Any = auto_class(spec.config).from_config(copy.deepcopy(spec.config), attn_implementation="sdpa")
        set_attention(model, "varlen")
        if adapters:
            model = get_peft_model(model, LoraConfig(target_modules=ADAPTED, r=4))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            on_gpu = nn.Parameter(torch.empty_like(parameter, device="cuda"), parameter.requires_grad)
            setattr(module, name, on_gpu)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device="cuda"))
    model.train()
    on_device = batch.map(lambda tensor: torch.empty_like(mode.from_tensor(tensor), device="cuda"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return HeadLoss(model).losses(model, on_device).weighted_sum()


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("name", [*ON_TEXT, *THAT_SEE, *THAT_HEAR])
def test_no_family_waits_for_the_device(
    name: str, adapters: bool, drawn_data: Path, tmp_path: Path, request: Any
) -> None:
    if name == "qwen2_sliding" and "window_size" not in signature(varlen_attn).parameters:
        pytest.skip("this torch's varlen attention has no sliding windows")
    config = config_of(name, drawn_data, tmp_path)
    if has_experts(config) and not traces_float32_experts():
        pytest.skip("this torch gives no shapes for the products of float32 experts")
    spec = InputSpec(str(tmp_path), config, MediaLimits())
    batch = batch_for(spec)
    mode = request.getfixturevalue("fake_cuda")
    loss = loss_of(mode, spec, batch, adapters=adapters)
    assert (loss.device.type, loss.dtype, loss.shape) == ("cuda", torch.float32, ())


class EventOfNothing:
    """In place of CUDA's, which needs a driver."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def end_of_step(norm: Tensor | float, loss: Tensor, on_nan: OnNan) -> StepWatch:
    """What watches a step, told of its numbers and asked before its update."""
    watch = StepWatch(
        StopSignals(),
        lambda: lambda step: [str(step)],
        on_nan=on_nan,
        world=World(),
        progress=SilentProgress(),
    )
    watch.record_loss(loss)
    watch.record_norm(norm)
    watch.before_update(0, torch.nn.Linear(1, 1), loss.device)
    return watch


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.usefixtures("fake_cuda")
def test_nan_check_does_not_wait(has_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", EventOfNothing)
    loss = torch.ones((), device="cuda")
    norm = loss if has_norm else 1.0
    watch = end_of_step(norm, loss, "stop")
    with pytest.raises(DataDependentOutputException):
        watch.check_last_step()
    with pytest.raises(DataDependentOutputException):
        end_of_step(norm, loss, "skip")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_nan_is_detected_on_a_gpu() -> None:
    one = torch.ones((), device="cuda")
    bad = one * float("nan")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        good, bad_step = end_of_step(one, one, "go-on"), end_of_step(one, bad, "go-on")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (good.check_last_step(), bad_step.check_last_step()) == (False, True)


def step_on(device: str, kernel: str, spec: InputSpec) -> Callable[[], Tensor]:
    """Forward and backward in bf16, with numbers; torch's grouped product of experts waits in float32."""
    model: Any = auto_class(spec.config).from_config(copy.deepcopy(spec.config), attn_implementation="sdpa")
    set_attention(model.to(device, torch.bfloat16).train(), kernel)
    head_loss, batch = HeadLoss(model), batch_for(spec).to(device)

    def step() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = head_loss.losses(model, batch).weighted_sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", [*ON_TEXT, *THAT_SEE])
def test_no_family_waits_on_a_gpu(name: str, tmp_path: Path) -> None:
    step = step_on("cuda", "varlen", InputSpec("", config_of(name, tmp_path, tmp_path), MediaLimits()))
    step()  # which loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_the_step_for_gpus_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    step = step_on("cpu", "sdpa", InputSpec("", config_of(name, tmp_path, tmp_path), MediaLimits()))
    assert step().isfinite()


def test_waiting_operations_are_detected(drawn_data: Path, tmp_path: Path, request: Any) -> None:
    """transformers' own way does: without tower inputs, at the first size that it asks the device for."""
    spec = InputSpec(str(tmp_path), config_of("qwen3_vl", drawn_data, tmp_path), MediaLimits())
    batch = batch_for(spec)
    object.__setattr__(batch, "towers", {})
    mode = request.getfixturevalue("fake_cuda")
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        loss_of(mode, spec, batch, adapters=False)
