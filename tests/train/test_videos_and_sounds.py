"""Videos and sounds in training: packed equals alone, nothing leaks, and the public commands work on them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import PackedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.collate_shard import collate_shard, with_rank_media
from packtool.batch.shard import SequenceSplit
from packtool.batch.spec import InputSpec
from packtool.config.data import EncodeSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.media_spans import sounds_in_order
from packtool.encode.model_files import ModelFiles
from packtool.errors import DataError
from packtool.planning.skrull import SHARDED
from packtool.progress import SilentProgress
from packtool.rows.sample import MediaRef, Sample, Turn
from packtool.train.loop.media_times import _measure_loading
from packtool.train.model.load import load_model
from packtool.train.model.loss import LossFunction
from tests.attention.parallel.shared_model import check_setting, forward_alone
from tests.forked import run_ranks
from tests.media.clips import write_clip, write_sound
from tests.train.real_models import FAMILIES, small_model

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def model_of(drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Directories of small models."""
    folder = tmp_path_factory.mktemp("models")
    torch.set_num_threads(1)
    return lambda family: small_model(drawn_data, family, folder)


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture, clips and a sound."""
    folder = tmp_path_factory.mktemp("media")
    noise = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "a.png")
    write_clip(folder / "plain.mp4", num_frames=40)
    write_clip(folder / "loud.mp4", num_frames=60, seconds_of_sound=2.4)
    write_sound(folder / "a.wav", 1.7)
    return folder


def samples_for(family: str, media: Path) -> list[Sample]:
    def sample(row_index: int, question: str, **refs: tuple[MediaRef, ...]) -> Sample:
        turns = (Turn("user", question), Turn("assistant", f"answer {row_index}"))
        return Sample(turns, refs.pop("images", ()), "rows.jsonl", row_index, **refs)  # type: ignore[arg-type]

    picture = MediaRef(str(media / "a.png"))
    clip, loud = MediaRef(str(media / "plain.mp4")), MediaRef(str(media / "loud.mp4"))
    samples = [
        sample(0, "<video>What?", videos=(clip,)),
        sample(1, "text alone"),
        sample(2, "<image> and <video>", images=(picture,), videos=(clip,)),
        sample(3, "<image>Which?", images=(picture,)),
    ]
    if "omni" in family:
        sound = MediaRef(str(media / "a.wav"))
        samples += [
            sample(4, "<audio>Who?", audios=(sound,)),
            sample(5, "<video> or <audio>?", videos=(loud,), audios=(sound,)),
        ]
        # Videos without a track lie beside videos with one only in other rows.
    return samples


def encoded(model: Path, samples: list[Sample], **spec: Any) -> tuple[list[EncodedSample], InputSpec]:
    settings = {"video_max_pixels": 40_000, "video_min_pixels": 1000, "max_pixels": 40_000, "min_pixels": 1000, **spec}
    if "omni" in model.name:
        settings["use_audio_in_video"] = True
    options = EncodeSpec(model=str(model), max_length=100_000, **settings)
    encoder = Encoder(options, ModelFiles.load(str(model)))
    results = encoder.encode(samples)
    assert all(isinstance(result, list) for result in results), results
    return [sample for result in results for sample in result], InputSpec.load(str(model), encoder.limits)


def test_planning_measures_videos_and_sounds(model_of: Make, media: Path) -> None:
    samples, spec = encoded(model_of("qwen3-omni"), samples_for("qwen3-omni", media))
    media_samples = [samples[5], *(sample for sample in samples if sample.videos or sample.audios)]
    sizes = {name: (media / name).stat().st_size for name in ("a.wav", "plain.mp4", "loud.mp4")}
    # The first is not counted. Sound tracks are read from their videos.
    count, seconds, size, num_samples = _measure_loading("videos", media_samples[:-2], spec, SilentProgress())
    assert (count, num_samples, size) == (2, 2, 2 * sizes["plain.mp4"])
    assert seconds > 0
    count, seconds, size, num_samples = _measure_loading(
        "sounds", [media_samples[0], *media_samples[-2:]], spec, SilentProgress()
    )
    assert (count, num_samples, size) == (3, 2, 2 * sizes["a.wav"] + sizes["loud.mp4"])
    assert seconds > 0


def logits_of(model: Any, samples: list[EncodedSample], spec: InputSpec) -> list[torch.Tensor]:
    return logits_of_pack(model, collate_packs(samples, spec), len(samples))


def with_a_small_head(model: Any) -> Any:
    """Logits of 256 tokens are a projection of the 64 hidden numbers as well as those of 150,000."""
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:256].detach().clone())
    return model


def logits_of_pack(model: Any, batch: PackedBatch, num_samples: int) -> list[torch.Tensor]:
    with torch.no_grad():
        logits = model(**batch.model_inputs()).logits[0]
    bounds = batch.cu_seqlens.tolist()
    return [logits[a:b] for a, b in pairwise(bounds)][:num_samples]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_equal_single_samples_without_leaks(model_of: Make, media: Path, family: str) -> None:
    directory = model_of(family)
    samples, spec = encoded(directory, samples_for(family, media))
    if "omni" in family:
        tracks = [video.audio is not None for sample in samples for video in sample.videos]
        assert True in tracks
        assert False in tracks
    model = with_a_small_head(load_model(str(directory), spec.config, dtype=torch.float32, packing=True).eval())
    batch = collate_packs(samples, spec)
    packed = logits_of_pack(model, batch, len(samples))
    largest = 0.0
    for sample, together in zip(samples, packed, strict=True):
        (single_logits,) = logits_of(model, [sample], spec)
        largest = max(largest, float((single_logits - together).abs().max()))
    assert largest < 5e-5
    assert max(float(logits.abs().max()) for logits in packed) > 0.5, "the model must say something"
    for touched in range(len(samples)):
        # In the batch itself: its pictures, frames and sounds need not be read again.
        changed, place = batch.input_ids.clone(), int(batch.cu_seqlens[touched + 1]) - 3
        changed[0, place] = 100 if changed[0, place] != 100 else 101
        moved = logits_of_pack(model, dataclasses.replace(batch, input_ids=changed), len(samples))
        for sample_index, (before, after) in enumerate(zip(packed, moved, strict=True)):
            if sample_index != touched:
                assert torch.equal(before, after), (touched, sample_index)
        assert not torch.equal(packed[touched], moved[touched])


def questions_about(family: str, media: Path) -> list[Sample]:
    """Rows that share videos, pictures and sounds, all of them or the first."""
    picture, clip = MediaRef(str(media / "a.png")), MediaRef(str(media / "plain.mp4"))
    questions: list[tuple[str, dict[str, tuple[MediaRef, ...]]]] = [
        ("<video>What?", {"videos": (clip,)}),
        ("<image> and <video>", {"images": (picture,), "videos": (clip,)}),
        ("<video>Who, and where?", {"videos": (clip,)}),
        ("<image>Which?", {"images": (picture,)}),
        ("<video>What?", {"videos": (clip,)}),
        ("<image> and <video>?", {"images": (picture,), "videos": (clip,)}),
    ]
    if "omni" in family:
        loud, sound = MediaRef(str(media / "loud.mp4")), MediaRef(str(media / "a.wav"))
        questions = [
            *questions[1:4],
            ("<video> or <audio>?", {"videos": (loud,), "audios": (sound,)}),
            ("<audio>Who?", {"audios": (sound,)}),
            ("<video> or <audio>: which?", {"videos": (loud,), "audios": (sound,)}),
            ("<audio><video>", {"videos": (loud,), "audios": (sound,)}),
            ("<video> or nothing", {"videos": (loud,)}),
        ]
    samples = []
    for question_index, (question, refs) in enumerate(questions):
        turns = (Turn("user", question), Turn("assistant", f"answer {question_index}"))
        samples.append(Sample(turns, refs.pop("images", ()), "rows.jsonl", question_index, **refs))  # type: ignore[arg-type]
    return samples


def loss_of(model: Any, batch: PackedBatch) -> torch.Tensor:
    """As in training: no logits where no token has a target, which the thinkers' own forward would make."""
    with LossFunction.temporary(model) as loss_function:
        return loss_function(model, batch).weighted_sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_media_of_a_shared_prefix_are_encoded_once(model_of: Make, media: Path, family: str) -> None:
    directory = model_of(family)
    samples, spec = encoded(directory, questions_about(family, media))
    model = load_model(str(directory), spec.config, dtype=torch.float32, packing=True).eval()
    batch = collate_tree(samples, spec, min_shared=1)
    assert isinstance(batch, TreeBatch)
    assert batch.input_ids.shape[1] < 0.8 * sum(sample.length for sample in samples)
    names = {name for name in batch.media if "grid" in name}
    unshared_batch = collate_packs(samples, spec)
    assert all(len(batch.media[name]) < len(unshared_batch.media[name]) for name in names)
    loss = loss_of(model, batch)
    loss.backward()
    gradients_by_name = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected_loss = 0.0
    for sample in samples:
        sample_loss = loss_of(model, collate_packs([sample], spec))
        sample_loss.backward()
        expected_loss += float(sample_loss.detach())
    assert float(loss.detach()) == pytest.approx(expected_loss, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in gradients_by_name)
        if parameter.grad is not None:
            unit = max(1.0, float(parameter.grad.abs().max()))
            assert float((gradients_by_name[name] - parameter.grad).abs().max()) < 1e-5 * unit, name


# A ring, whose chunks cut sounds and woven tracks anywhere, and Ulysses.
SHARED = {"qwen2.5-omni": Axes(2, 1, "ring"), "qwen3-omni": Axes(1, 2)}


def test_two_ranks_share_sequences_with_sounds(model_of: Make, media: Path, tmp_path: Path) -> None:
    """Logits, loss, gradients of towers and text as on one rank; sounds are dealt out, and each is heard once."""
    worlds = {}
    for family in SHARED:
        directory = model_of(family)
        samples, spec = encoded(directory, samples_for(family, media))
        model = with_a_small_head(load_model(str(directory), spec.config, dtype=torch.float32, packing=True).eval())
        # Which are as large as those of 150,000 tokens are, and tell nothing of sounds.
        model.get_input_embeddings().requires_grad_(False)
        # The head's own tokens.
        small = [dataclasses.replace(sample, labels=np.minimum(sample.labels, 255)) for sample in samples]
        setting = spec, model, small
        worlds[family] = setting, forward_alone(setting)
    run_ranks(2, check_shared, worlds, tmp_path, scratch=tmp_path)
    errors = json.loads((tmp_path / "errors.json").read_text())
    for family in SHARED:
        logits, loss, gradients, moved = errors[family]
        assert max(logits, loss, gradients) < 2e-6, family
        assert moved == 0, family


def check_shared(worlds: dict[str, Any], folder: Path) -> None:
    """On each rank."""
    dist.init_process_group("gloo")
    results = {}
    for family, (setting, expected) in worlds.items():
        spec, _, samples = setting
        parallel = SequenceParallel.on_mesh(SHARED[family], "cpu")
        results[family] = check_setting(setting, expected, parallel)
        # Text alone: both listen to silence, and nothing comes of it.
        silent = collate_shard(samples[1:2], spec, parallel.split)
        assert silent.media["feature_attention_mask"].sum() == spec.family.mel_frames
        assert not sum(silent.shard.routes["audio"].send_counts)
    if dist.get_rank() == 0:
        (folder / "errors.json").write_text(json.dumps(results))


@pytest.mark.parametrize("places", [[SHARDED] * 6, [SHARDED, 1, 0, SHARDED, SHARDED, 1]], ids=["sharded", "some local"])
def test_each_sound_is_encoded_by_one_rank(model_of: Make, media: Path, places: list[int]) -> None:
    """By itself, also where its tokens lie between those of a video that is another rank's."""
    samples, spec = encoded(model_of("qwen3-omni"), samples_for("qwen3-omni", media))
    ranks = [with_rank_media(samples, places, spec, SequenceSplit(2, 1, rank)) for rank in range(2)]
    for sample_index, (sample, place) in enumerate(zip(samples, places, strict=True)):
        num_sound_tokens = [sound.num_tokens for sound, _, _ in sounds_in_order(sample, spec.media_tokens)]
        num_tokens_by_rank = [[sound.num_tokens for sound in rank[sample_index].audios] for rank in ranks]
        assert sorted(num_tokens_by_rank[0] + num_tokens_by_rank[1]) == sorted(num_sound_tokens)
        assert not any(video.audio for rank in ranks for video in rank[sample_index].videos)
        if place != SHARDED:
            assert num_tokens_by_rank[place] == num_sound_tokens, "in the order of their tokens"
    # The last sample has a track and a sound; all its media are named by the files that they lie in.
    assert {Path(str(sound.path)).name for rank in ranks for sound in rank[5].audios} == {"loud.mp4", "a.wav"}


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-omni"])
def test_logits_depend_on_the_pixels(model_of: Make, media: Path, family: str, tmp_path: Path) -> None:
    directory = model_of(family)
    (sample, *_), spec = encoded(directory, samples_for(family, media)[:1])
    model = load_model(str(directory), spec.config, dtype=torch.float32, packing=True).eval()
    (before,) = logits_of(model, [sample], spec)
    write_clip(tmp_path / "other.mp4", num_frames=40, fps=25, size=(64, 96))
    data = (tmp_path / "other.mp4").read_bytes()
    video = sample.videos[0]
    dark = type(video)(
        **{**vars(video), "path": None, "data": data, "indices": tuple(max(i - 1, 0) for i in video.indices)}
    )
    (after,) = logits_of(model, [EncodedSample(**{**vars(sample), "videos": (dark,)})], spec)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen2.5-omni"])
def test_a_changed_file_is_named(model_of: Make, media: Path, family: str, tmp_path: Path) -> None:
    directory = model_of(family)
    path = write_clip(tmp_path / "a.mp4", num_frames=40, seconds_of_sound=1.6)
    turns = (Turn("user", "<video>?"), Turn("assistant", "!"))
    sample = Sample(turns, (), "rows.jsonl", 7, videos=(MediaRef(str(path)),))
    encoded_samples, spec = encoded(directory, [sample])
    collate_packs(encoded_samples, spec)
    write_clip(path, num_frames=40, size=(96, 64), seconds_of_sound=1.6)
    with pytest.raises(DataError, match=r"a\.mp4 \(row 7 of rows\.jsonl\) has changed since the export"):
        collate_packs(encoded_samples, spec)
    write_clip(path, num_frames=10, seconds_of_sound=1.6)
    with pytest.raises(DataError, match=r"a\.mp4 is damaged, or has changed since .*: the export counted a frame \d+"):
        collate_packs(encoded_samples, spec)
    if "omni" in family:
        write_clip(path, num_frames=40, seconds_of_sound=0.5)
        with pytest.raises(DataError, match=r"a\.mp4 is damaged, or has changed since .* counted 1\.\d+ s of sound"):
            collate_packs(encoded_samples, spec)


def test_commands_train_on_videos_and_sounds(model_of: Make, drawn_data: Path, tmp_path: Path) -> None:
    from packtool.cli.main import run

    directory = model_of("qwen3-omni")
    names = ["mm_llamafactory_mllm_video_demo", "mm_xtuner_coco_zh"]
    names += ["mm_llamafactory_mllm_audio_demo", "mm_llamafactory_mllm_video_audio_demo"]
    limits = [
        "--video-max-pixels",
        "20000",
        "--video-min-pixels",
        "1000",
        "--max-pixels",
        "20000",
        "--min-pixels",
        "1000",
    ]
    rows = [str(drawn_data / f"{name}.jsonl") for name in names]
    export = ["export", "--model", str(directory), "--dataset", *rows, "--max-length", "2048", *limits]
    assert run([*export, "--output-dir", str(tmp_path / "cache")]) == 0
    train = ["train", "--model", str(directory), "--cached-dataset", str(tmp_path / "cache"), "--packing", "true"]
    train += ["--train-type", "full", "--freeze-vit", "false", "--freeze-aligner", "false", "--max-steps", "2"]
    train += ["--output-dir", str(tmp_path / "out"), "--dataloader-num-workers", "0", "--learning-rate", "1e-3"]
    assert run(train) == 0
    result = json.loads((tmp_path / "out" / "packtool_train.json").read_text())
    assert result["steps"] == 2
    assert np.isfinite(result["last_loss"])


def test_repeated_limits_must_match_the_cache(model_of: Make, media: Path, tmp_path: Path, capsys: Any) -> None:
    from packtool.cli.main import run

    directory = model_of("qwen3-vl")
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "!"}]
    rows.write_text(json.dumps({"messages": turns, "videos": [str(media / "plain.mp4")]}) + "\n")
    cache = str(tmp_path / "cache")
    export = ["export", "--model", str(directory), "--dataset", str(rows), "--max-length", "4096", "--fps", "4"]
    export += ["--media-root", str(media)]
    assert run([*export, "--output-dir", cache]) == 0
    train = ["train", "--model", str(directory), "--cached-dataset", cache, "--output-dir", str(tmp_path / "out")]
    assert run([*train, "--dry-run", "--fps", "4", "--fps-max-frames", "768"]) == 0
    assert run([*train, "--dry-run", "--fps", "2"]) == 4
    stderr = capsys.readouterr().err
    assert "FPS 4.0 in the cache, 2.0 in this run" in stderr
    assert "packtool export --dataset" in stderr
    assert "--fps 2.0" in stderr
