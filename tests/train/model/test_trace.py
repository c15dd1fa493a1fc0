"""The traced memory of a pass against that of the same pass computed, for every family."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from packtool.attention.parallel import mesh
from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import B, TreeBatch
from packtool.batch.collate import collate_tree
from packtool.batch.collate_shard import collate_shard
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.encode.families import MediaLimits
from packtool.encode.families.qwen_omni import num_sound_tokens
from packtool.train.model.trace import PassBytes, traced_batch
from packtool.train.prepare.figures import RankTokens
from tests.attention.hybrids import hybrid_config
from tests.batch.reduced import continued_sample, make_sample, reduced_config, reduced_spec, save_image_processor
from tests.forked import run_ranks
from tests.train.model.measured import computed_bytes, saved_bytes, traced_bytes
from tests.train.model.real_steps import wait_for_release
from tests.train.real_models import ON_TEXT, THAT_HEAR, THAT_SEE, has_experts, traces_float32_experts
from tests.train.real_models import config_of as any_config_of

SHARED = {"ring": Axes(2, 1, "ring"), "allgather": Axes(2, 1, "allgather"), "ulysses": Axes(1, 2)}
# Text alone, with linear attention and experts, with DeepStack, and with sounds.
OTHERWISE = ("qwen3", "qwen3_5_moe", "qwen3_vl", "qwen2.5-omni")


def config_of(name: str, drawn_data: Path, folder: Path) -> PreTrainedConfig:
    config = any_config_of(name, drawn_data, folder)
    if has_experts(config) and not traces_float32_experts():
        pytest.skip("this torch gives no shapes for the products of float32 experts")
    return config


@pytest.mark.parametrize("name", [*ON_TEXT, *THAT_SEE, *THAT_HEAR])
def test_traced_bytes_equal_those_of_the_pass(name: str, drawn_data: Path, tmp_path: Path) -> None:
    """And what is kept is what autograd saves, counted otherwise: by the hooks of saved tensors."""
    config = config_of(name, drawn_data, tmp_path)
    traced = traced_bytes(config)
    check_same(traced, computed_bytes(config))
    assert traced.kept == pytest.approx(saved_bytes(config), rel=0.05)


@pytest.mark.parametrize("name", OTHERWISE)
@pytest.mark.parametrize("options", [{"adapters": True}, {"recomputes": True}], ids=str)
def test_traced_bytes_with_adapters_or_recomputation(
    name: str, options: dict[str, bool], drawn_data: Path, tmp_path: Path
) -> None:
    config = config_of(name, drawn_data, tmp_path)
    check_same(traced_bytes(config, **options), computed_bytes(config, **options))


def check_same(traced: PassBytes, measured: PassBytes) -> None:
    assert traced.kept == pytest.approx(measured.kept, rel=0.05)
    assert traced.peak == pytest.approx(measured.peak, rel=0.05)


@pytest.mark.parametrize("name", THAT_HEAR)
def test_sounds_are_traced(name: str, drawn_data: Path, tmp_path: Path) -> None:
    """Two sounds of 2.0 and 1.3 seconds against the one that is traced for them: what they add to text alone."""
    config = config_of(name, drawn_data, tmp_path)
    spec, frames = InputSpec("", config, MediaLimits()), (200, 132)
    is_qwen3 = name.startswith("qwen3")
    audio_tokens = RankTokens(
        computed=160, audio=sum(num_sound_tokens(num_frames, is_qwen3=is_qwen3) for num_frames in frames)
    )
    text = traced_batch(spec, RankTokens(computed=160), Axes())
    mask = torch.stack([torch.arange(max(frames)) < num_frames for num_frames in frames]).to(torch.int64)
    media = {"input_features": torch.zeros(2, spec.num_mel_bins, max(frames)), "feature_attention_mask": mask}
    ids = text.input_ids.clone()
    ids[0, : audio_tokens.audio] = spec.pad_ids["audio"]
    batch = dataclasses.replace(text, input_ids=ids, media=media, towers=tower_inputs(spec, media, ids))
    text_only = traced_bytes(config, tokens=RankTokens(computed=160))
    traced, measured = traced_bytes(config, tokens=audio_tokens), computed_bytes(config, batch=batch)
    assert traced.kept - text_only.kept == pytest.approx(measured.kept - text_only.kept, rel=0.05)
    assert traced.peak - text_only.peak == pytest.approx(measured.peak - text_only.peak, rel=0.05)
    picture = traced_bytes(config, tokens=RankTokens(computed=160, vision=audio_tokens.audio))
    assert abs(picture.kept - text_only.kept) > 1.2 * (traced.kept - text_only.kept), "a sound is no picture"


def test_shared_sequences_are_traced(tmp_path: Path) -> None:
    """Each way's own exchanges on two ranks, with pictures of which one is larger than all of the others."""
    run_ranks(2, _measure_shared, tmp_path, scratch=tmp_path)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [rank["ring False"]["num_local_vision_tokens"] for rank in ranks] == [16, 3]
    peaks = {}
    for key in ranks[0]:
        parallel_type, recomputes = key.split()
        heaviest = max((rank[key] for rank in ranks), key=lambda figures: int(figures["peak"]))
        tokens = RankTokens(**{name: heaviest[name] for name in ("computed", "vision", "num_local_vision_tokens")})
        config = reduced_config("qwen3_vl")
        traced = traced_bytes(config, recomputes=recomputes == "True", tokens=tokens, axes=SHARED[parallel_type])
        assert traced.kept == pytest.approx(heaviest["kept"], rel=0.01), key
        assert traced.peak == pytest.approx(heaviest["peak"], rel=0.01), key
        if recomputes == "False":
            assert traced.kept == pytest.approx(heaviest["saved"], rel=0.01), key
        peaks[key] = traced.peak
    for recomputes in (False, True):
        assert peaks[f"ulysses {recomputes}"] > peaks[f"ring {recomputes}"], "the trace runs the exchanges of each way"
    # Gated delta nets, of which each rank has some heads and all tokens. Where these lie is told by integers that come
    # from numpy, which only the trace counts.
    integers = 4 * 8 * 192
    hybrid, tokens = json.loads((tmp_path / "hybrid.json").read_text()), RankTokens(computed=96)
    for recomputes in (False, True):
        kept_bytes, peak = hybrid[str(recomputes)]
        traced = traced_bytes(hybrid_config("qwen3_5"), recomputes=recomputes, tokens=tokens, axes=SHARED["ulysses"])
        assert traced.kept == pytest.approx(kept_bytes, abs=integers)
        assert traced.peak == pytest.approx(peak, abs=integers)


@pytest.mark.parametrize("kind", SHARED)
def test_prefixes_of_shared_sequences_are_traced(kind: str) -> None:
    """Each layer copies the keys of prefixes for the documents that continue them, and keeps none of the copies."""
    tokens = RankTokens(computed=160)
    plain = traced_bytes(reduced_config("qwen3"), tokens=tokens, axes=SHARED[kind])
    peaks = [plain.peak]
    for num_keys in (1500, 3000):
        tree = dataclasses.replace(tokens, keys=num_keys)
        traced = traced_bytes(reduced_config("qwen3"), tokens=tree, axes=SHARED[kind])
        assert traced.kept == pytest.approx(plain.kept, rel=0.02)
        peaks.append(traced.peak)
    assert peaks == sorted(set(peaks))
    traced_bytes(hybrid_config("qwen3_5"), tokens=dataclasses.replace(tokens, keys=700), axes=SHARED[kind])


def test_sounds_of_shared_sequences_are_traced(drawn_data: Path, tmp_path: Path) -> None:
    """A rank may hear more than it holds the tokens of, or nothing."""
    config = config_of("qwen2.5-omni", drawn_data, tmp_path)
    rank_tokens = partial(RankTokens, computed=160, audio=60)
    min_peak, even, max_peak = (
        traced_bytes(config, tokens=rank_tokens(num_local_audio_tokens=num_audio_tokens), axes=SHARED["ulysses"]).peak
        for num_audio_tokens in (0, 60, 240)
    )
    assert min_peak < even < max_peak


def _measure_shared(folder: Path) -> None:
    mesh._start = wait_for_release(mesh._start)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_image_processor("qwen3_vl", str(folder))
    dist.barrier()
    spec = reduced_spec("qwen3_vl", str(folder))
    sides = {0: (64, 64), 1: (16, 16), 2: (16, 32)}
    samples = [make_sample(96, (side,), seed=seed, limits=spec.limits.image) for seed, side in sides.items()]
    measurements = {}
    for parallel_type, axes in SHARED.items():
        parallel = SequenceParallel.on_mesh(axes, "cpu")
        batch = collate_shard(samples, spec, parallel.split)
        batch, count = _with_targets(batch), batch.input_ids.shape[1]
        for recomputes in (False, True):
            measured_bytes = computed_bytes(spec.config, recomputes=recomputes, batch=batch, parallel=parallel)
            measurements[f"{parallel_type} {recomputes}"] = {
                "kept": measured_bytes.kept,
                "peak": measured_bytes.peak,
                "saved": saved_bytes(spec.config, batch, parallel),
                "computed": count,
                "vision": int((batch.input_ids == spec.pad_ids["image"]).sum()),
                "num_local_vision_tokens": len(batch.media["pixel_values"]) // 4,
            }
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(measurements))
    parallel = SequenceParallel.on_mesh(SHARED["ulysses"], "cpu")
    config = hybrid_config("qwen3_5")
    spec = InputSpec("", config, MediaLimits())
    batch = _with_targets(collate_shard([make_sample(192, seed=0)], spec, parallel.split, towers=frozenset()))
    measured = {}
    for recomputes in (False, True):
        measured_bytes = computed_bytes(config, recomputes=recomputes, batch=batch, parallel=parallel)
        measured[str(recomputes)] = [measured_bytes.kept, measured_bytes.peak]
    (folder / "hybrid.json").write_text(json.dumps(measured))


@pytest.mark.parametrize("recomputes", [False, True])
def test_keys_of_shared_prefixes_are_traced(recomputes: bool, tmp_path: Path) -> None:
    """A picture and a long question with five answers."""
    save_image_processor("qwen3_vl", str(tmp_path))
    spec = reduced_spec("qwen3_vl", str(tmp_path))
    trunk = make_sample(120, ((64, 64),), seed=1, limits=spec.limits.image)
    batch = collate_tree([continued_sample(trunk, make_sample(9, seed=seed)) for seed in range(2, 7)], spec)
    assert isinstance(batch, TreeBatch)
    batch, count = _with_targets(batch), batch.input_ids.shape[1]
    tokens = RankTokens(computed=count, vision=16, keys=len(batch.key_index))
    assert tokens.keys > 4 * count
    traced = traced_bytes(spec.config, recomputes=recomputes, tokens=tokens)
    measured = computed_bytes(spec.config, recomputes=recomputes, batch=batch)
    without_gathered = traced_bytes(spec.config, recomputes=recomputes, tokens=dataclasses.replace(tokens, keys=0))
    assert traced.kept == pytest.approx(measured.kept, rel=0.01)
    assert traced.peak == pytest.approx(measured.peak, rel=0.01)
    assert traced.peak > 1.1 * without_gathered.peak, "gathered keys are seen"
    if not recomputes:
        assert traced.kept == pytest.approx(saved_bytes(spec.config, batch), rel=0.01)


def _with_targets(batch: B) -> B:
    """As a trace has them: the last half of the tokens."""
    count = batch.input_ids.shape[1]
    targets = torch.arange(count - count // 2, count)
    return dataclasses.replace(
        batch, labels=torch.zeros_like(batch.labels), target_positions=targets, loss_weights=None
    )
