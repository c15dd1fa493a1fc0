"""Families whose own processor makes their pictures, each with a reduced model and pictures: what its record claims."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from PIL import Image
from transformers import Gemma2Config, Qwen2VLImageProcessor
from transformers.image_processing_backends import TorchvisionBackend

from packtool.attention.features import install_tower_hooks
from packtool.attention.kernel import LeakError
from packtool.attention.parallel.axes import Axes, refuse_unshareable_sequences
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import set_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.batch import PackedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_padded, collate_tree
from packtool.batch.collate_shard import collate_shard
from packtool.batch.media import large_processed, load_media, load_processed, skip_pixel_copies
from packtool.batch.media_cache import MediaReads
from packtool.batch.spec import InputSpec, auto_class
from packtool.config.data import EncodeSpec, MediaCacheOptions
from packtool.config.train import TrainConfig
from packtool.constants import BOX_MARK, NAME_MARK
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.families import FAMILIES
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, MediaError, UnsupportedModelError
from packtool.media.measure import load_image
from packtool.planning.cost import CostModel
from packtool.progress import SilentProgress
from packtool.rows.sample import Dropped, MediaRef, Objects, Region, Sample, Turn
from packtool.train.loop.media_times import _measure_loading
from packtool.train.loop.step_loader import required_towers
from packtool.train.model.trace import trace_pass, traced_batch
from packtool.train.model.trainable import make_trainable, tower_prefixes
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.shared_prefixes import conflicts_of_sharing
from packtool.train.verify.checks import (
    PackUnderTest,
    check_gradients,
    check_isolation,
    check_logits,
    check_prefixes,
    collate_alone,
)
from tests.attention.parallel.shared_model import Found, Setting, check_setting, forward_alone
from tests.encode.other_families import model_of, tokens_of
from tests.forked import run_ranks
from tests.media.clips import write_clip
from tests.train.model.measured import computed_bytes, measured_model
from tests.train.real_models import traces_float32_experts

TRAINED = [
    name
    for family in FAMILIES
    if family.kinds == ("image",) or family.videos_as_pictures
    for name in family.model_types
]
WITH_VIDEOS = [name for family in FAMILIES if family.videos_as_pictures for name in family.model_types]
WITH_BOTH = [name for name in WITH_VIDEOS if name != "smolvlm"]
"""That take rows with pictures and videos; the tiles of SmolVLM's pictures cannot be told from frames."""
WITHOUT_RATE = ("minicpmv4_6", "minicpm_ocr")
"""Whose processors sample no given number of frames per second."""
GLM = [name for name in WITH_VIDEOS if name.startswith("glm")]
OWN_PADS = [name for family in FAMILIES if family.video_outputs for name in family.model_types]
"""Whose videos have placeholder tokens of their own, and are encoded as pictures."""
TRAINED += ["pixtral"]  # LLaVA with another tower and processor
WHOLE = [name for family in FAMILIES if family.whole_pictures for name in family.model_types]
"""That see pictures as wholes."""
ACROSS = [name for family in FAMILIES if family.cross_attention for name in family.model_types]
"""Whose text attends to pictures by cross-attention."""
UNSHARED = {name: family.unshared for family in FAMILIES if family.unshared for name in family.model_types}
"""Whose sequences are not shared, and why."""
TINY = [*itertools.product(range(1, 5), repeat=2), (1, 31), (3, 31), (31, 1), (31, 3), (1, 190), (3, 190), (190, 1)]
"""(height, width) of pictures of few pixels."""
PICTURES: list[bytes] = []
"""Photographs, made small."""
VIDEOS: list[bytes] = []
"""Clips of unlike sizes and lengths."""


@dataclasses.dataclass(frozen=True)
class World:
    """A family's directory, processor, encoded rows and what collation knows."""

    name: str
    directory: Path
    processor: Any
    samples: list[EncodedSample]
    spec: InputSpec

    def model(self) -> Any:
        """With weights large enough that every token matters."""
        torch.manual_seed(0)
        config = copy.deepcopy(self.spec.config)  # a model writes its choice of attention into it
        model = auto_class(config).from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.08)
            elif parameter.numel() == 1:  # gates, which begin closed
                torch.nn.init.constant_(parameter, 0.5)
        return model


def row(row_index: int, question: str, *pictures: int) -> Sample:
    media = tuple(MediaRef(None, PICTURES[each]) for each in pictures)
    return Sample((Turn("user", question), Turn("assistant", f"Answer {row_index}.")), media, "rows.jsonl", row_index)


def pictures(*numbers: int) -> tuple[MediaRef, ...]:
    return tuple(MediaRef(None, PICTURES[number]) for number in numbers)


def noise(height: int, width: int) -> bytes:
    """A PNG file."""
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def rows_for(name: str) -> list[Sample]:
    rows = [row(0, "<image>What?", 0), row(1, "text"), row(2, "<image>", 1), row(3, "Is <image> it?", 2)]
    rows.append(row(4, "<image> or <image>?", 2, 0))
    rows += [film(5, "<video>What?", 0), film(6, "Is <video> <video>?", 1, 0)] if name in WITH_VIDEOS else []
    return rows


def film(row_index: int, question: str, *videos: int) -> Sample:
    media = tuple(MediaRef(None, VIDEOS[each]) for each in videos)
    return dataclasses.replace(row(row_index, question), videos=media)


def encode(directory: Path, rows: list[Sample], **settings: Any) -> list[Any]:
    spec = EncodeSpec(model=str(directory), **{"max_length": 10_000, **settings})
    return Encoder(spec, ModelFiles.load(str(directory))).encode(rows)


@pytest.fixture(scope="module", autouse=True)
def media(drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for index, size in enumerate([(100, 60), (70, 150), (30, 30)]):
        with Image.open(drawn_data / "raw/llama-factory/data/mllm_demo_data" / f"{index + 1}.jpg") as image:
            image.convert("RGB").resize(size).save(file := io.BytesIO(), "PNG")
        PICTURES.append(file.getvalue())
    for index, size in enumerate([(32, 48), (64, 40)]):
        clip = write_clip(tmp_path_factory.mktemp("clips") / "a.mp4", size=size, num_frames=30 + 21 * index)
        VIDEOS.append(clip.read_bytes())


@pytest.fixture(scope="module")
def world_of(drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """The world of a family, made once."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str) -> World:
        directory, processor = model_of(name, drawn_data, folder)
        files = ModelFiles.load(str(directory))
        encoder = Encoder(EncodeSpec(model=str(directory), max_length=10_000), files)
        samples = [sample for samples in encoder.encode(rows_for(name)) for sample in samples]
        return World(name, directory, processor, samples, InputSpec.load(str(directory), encoder.limits))

    return make


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRAINED)
def test_tokens_and_pixels_equal_those_of_the_processor(world_of: Callable[[str], World], name: str) -> None:
    world = world_of(name)
    for sample, row in zip(world.samples, rows_for(name), strict=True):
        expected = tokens_of(world.processor, row)
        np.testing.assert_array_equal(sample.input_ids, expected.pop("input_ids")[0])
        inputs = load_media([sample], world.spec)
        outputs = dict(zip(world.spec.family.video_outputs, world.spec.family.processor_inputs, strict=False))
        if outputs and sample.videos:
            expected |= {name: expected[output] for output, name in outputs.items()}
        elif "video_grid_thw" in expected:  # the same patches, and each step in time is a picture
            steps = [[1, *sides] for times, *sides in expected["video_grid_thw"].tolist() for _ in range(times)]
            expected["image_grid_thw"] = torch.tensor(steps)
            expected["pixel_values"] = expected["pixel_values_videos"]
        names = world.spec.family.processor_inputs or world.spec.family.image_inputs
        if (tiles := inputs.pop("tiles", None)) is not None:  # of pictures that are not cut, and of frames
            assert tiles.tolist() == [[1, 1]] * len(sample.images) + [[len(v.indices), 2] for v in sample.videos]
            names = ("pixel_values",)
            assert not len(inputs.pop("image_sizes"))
        names = (*names, "video_compression_mask")
        assert set(inputs) == {key for key in expected if key in names}
        for key, tensor in inputs.items():
            expected_tensor = torch.as_tensor(expected[key])
            # Pictures of one row lie side by side in some families, without what fills up the smaller one.
            assert torch.equal(tensor[tensor != 0], expected_tensor[expected_tensor != 0])
            is_flat = tiles is not None or name == "smolvlm"  # one row for each tile
            assert (tensor.shape == expected_tensor.shape) or len(sample.images) > 1 or is_flat


@pytest.mark.parametrize("name", TRAINED)
def test_tiny_and_narrow_images_match_the_processor(world_of: Callable[[str], World], name: str) -> None:
    """Arrays of these shapes could be read with their height as channels."""
    world = world_of(name)
    names = world.spec.family.processor_inputs or world.spec.family.image_inputs
    questions = [
        dataclasses.replace(row(index, "<image>?"), images=(MediaRef(None, noise(*size)),))
        for index, size in enumerate(TINY)
    ]
    for question, encoded in zip(questions, encode(world.directory, questions), strict=True):
        if isinstance(encoded, Dropped):
            assert encoded.reason == "media_size"
            with pytest.raises((ValueError, ZeroDivisionError)):
                tokens_of(world.processor, question)
            continue
        expected = tokens_of(world.processor, question)
        np.testing.assert_array_equal(encoded[0].input_ids, expected["input_ids"][0])
        inputs = load_media(encoded, world.spec)
        assert set(inputs) == {key for key in expected if key in names}
        for key, tensor in inputs.items():
            expected_tensor = torch.as_tensor(expected[key])
            expected_tensor = expected_tensor.reshape(tensor.shape) if name == "smolvlm" else expected_tensor
            assert torch.equal(tensor, expected_tensor), (key, TINY[question.row])


@pytest.mark.smoke
@pytest.mark.parametrize("name", TRAINED)
def test_packed_samples_equal_single_samples(world_of: Callable[[str], World], name: str) -> None:
    world = world_of(name)
    refuse_unsupported(world.spec.config)
    model = world.model()
    set_attention(model)
    pack = PackUnderTest(model, world.samples, world.spec, torch.float32)
    assert pack.batch.position_ids.ndim == (3 if world.spec.has_mrope else 2)
    for check in (check_isolation(pack), check_logits(pack), check_gradients(pack)):
        assert check.error <= check.allowed, check
    # A micro-batch without a picture looks at a blank one, which changes nothing.
    blank = collate_packs(world.samples[1:2], world.spec)
    assert blank.media["pixel_values"].numel()
    assert blank.lengths[0] == world.samples[1].length
    with torch.no_grad():
        logits = model(**blank.model_inputs()).logits[0, : blank.lengths[0]]
        bare = collate_packs(world.samples[1:2], world.spec, frozenset())
        torch.testing.assert_close(model(**bare.model_inputs()).logits[0], logits, rtol=0, atol=1e-5)


def mixed(row_index: int) -> Sample:
    """A picture between two videos, and one behind them."""
    videos = film(row_index, "<video> or <image> or <video> or <image>?", 1, 0)
    return dataclasses.replace(videos, images=pictures(2, 0))


def test_transformers_fails_on_videos_of_kimi(world_of: Callable[[str], World]) -> None:
    """The reason why its rows with videos are dropped; pictures are parts of one frame."""
    world = world_of("kimi_k25")
    inputs = tokens_of(world.processor, film(0, "<video>?", 1))
    patches, grids = inputs["pixel_values_videos"][:32], torch.tensor([(2, 4, 4)])
    model = world.model().model
    assert len(model.get_video_features(patches[:16], torch.tensor([(1, 4, 4)])).pooler_output[0]) == 4
    with pytest.raises(RuntimeError, match=r"split_sizes to sum exactly to 4 .* got split_sizes=\[8\]"):
        model.get_video_features(patches, grids)


@pytest.mark.parametrize("name", [*OWN_PADS, "internvl"])
def test_videos_and_pictures_of_a_row_give_the_logits_of_the_model(world_of: Callable[[str], World], name: str) -> None:
    """Against its own forward of its own processor's outputs."""
    world = world_of(name)
    model = world.model()
    rows = [*rows_for(name)[-2:], mixed(7)]
    samples = [sample for samples in encode(world.directory, rows) for sample in samples]
    for row, sample in zip(rows, samples, strict=True):
        inputs = {key: torch.as_tensor(value) for key, value in tokens_of(world.processor, row).items()}
        assert torch.equal(inputs["input_ids"][0], torch.from_numpy(sample.input_ids).long())
        del inputs["attention_mask"]
        unused = [key for key in inputs if "num_soft" in key or key == "second_per_grid_ts"]
        with torch.no_grad():
            expected = model(**{key: value for key, value in inputs.items() if key not in unused}).logits[0]
            install_tower_hooks(model)
            alone = model(**collate_alone(sample, world.spec).model_inputs()).logits[0]
        torch.testing.assert_close(alone, expected, rtol=0, atol=2e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("name", WITH_BOTH)
def test_packed_rows_with_pictures_and_videos_equal_single_rows(world_of: Callable[[str], World], name: str) -> None:
    """Clips, and frames per second of a row, included."""
    world = world_of(name)
    model = world.model()
    clip = MediaRef(None, VIDEOS[1], clip=(0.4, 1.6))
    fps = () if name in ("glm46v", "glm_ocr", *WITHOUT_RATE) else (("fps", 2.0),)  # GLM: by the duration
    videos = clip, MediaRef(None, VIDEOS[1], limits=fps)
    rows = [mixed(7), dataclasses.replace(mixed(8), videos=videos)]
    rows.append(dataclasses.replace(film(9, "<video>?"), videos=(clip,)))
    samples = [sample for samples in encode(world.directory, rows) for sample in samples]
    assert [len(sample.media) for sample in samples] == [4, 4, 1]
    assert samples[0].videos != samples[1].videos
    set_attention(model)
    pack = PackUnderTest(model, [*samples, *world.samples[:3]], world.spec, torch.float32)
    for check in (check_isolation(pack), check_logits(pack), check_gradients(pack)):
        assert check.error <= check.allowed, check


@pytest.mark.parametrize("name", [name for name in WITH_BOTH if name not in WITHOUT_RATE])  # MiniCPM-V is recurrent
@pytest.mark.parametrize(
    ("questions", "videos", "images"),
    [
        (["<video> or <image> or <video> or <image>?"] * 2, [(1, 0), (1, 1)], [(2, 0), (2, 1)]),
        (["<video> or <image> or <video> or <image>?", "<video> or <image> or <image>?"], [(1, 0), (1,)], [(2, 0)] * 2),
        (["Which of these: <video> or <image>?"] * 2, [(0,), (1,)], [(2,)] * 2),  # apart before their first frames
    ],
)
def test_rows_with_pictures_and_videos_share_a_prefix(
    world_of: Callable[[str], World],
    name: str,
    questions: list[str],
    videos: list[tuple[int, ...]],
    images: list[tuple[int, ...]],
) -> None:
    world = world_of(name)
    rows = [
        dataclasses.replace(film(index, question, *films), images=pictures(*numbers))
        for index, (question, films, numbers) in enumerate(zip(questions, videos, images, strict=True))
    ]
    samples = [sample for samples in encode(world.directory, rows) for sample in samples]
    model = world.model()
    set_attention(model)
    tree = PackUnderTest(model, samples, world.spec, torch.float32, min_shared=4)
    assert isinstance(tree.batch, TreeBatch)
    assert len(tree.nodes) == len(samples) + 1
    for check in (check_isolation(tree), check_logits(tree), check_prefixes(tree), check_gradients(tree)):
        assert check.error <= check.allowed, check


@pytest.mark.parametrize("name", GLM)
def test_pictures_and_videos_of_a_row_have_the_features_of_the_model(
    world_of: Callable[[str], World], name: str
) -> None:
    """transformers' forward takes no row with both: here its features of each are put in place by the token types."""
    world = world_of(name)
    model = world.model()
    ((sample,),) = encode(world.directory, [mixed(7)])
    outputs = {key: torch.as_tensor(value) for key, value in tokens_of(world.processor, mixed(7)).items()}
    ids, kinds = outputs["input_ids"], outputs["mm_token_type_ids"]
    np.testing.assert_array_equal(sample.input_ids, ids[0])
    batch = collate_packs([sample], world.spec)
    image_grids, video_grids = outputs["image_grid_thw"], outputs["video_grid_thw"]
    first, second = outputs["pixel_values"].split(image_grids.prod(dim=1).tolist())
    video, other_video = outputs["pixel_values_videos"].split(video_grids.prod(dim=1).tolist())
    assert torch.equal(batch.media["pixel_values"], torch.cat([video, first, other_video, second]))
    grids = {"image_grid_thw": image_grids, "video_grid_thw": video_grids}
    positions, _ = model.model.get_rope_index(ids, kinds, **grids)
    assert torch.equal(batch.position_ids[1:, 0], positions[:, 0])
    with torch.no_grad():
        features = {
            1: model.model.get_image_features(outputs["pixel_values"], image_grids, return_dict=True),
            2: model.model.get_video_features(outputs["pixel_values_videos"], video_grids, return_dict=True),
        }
        embeddings = model.get_input_embeddings()(ids)
        for kind, encoded in features.items():
            embeddings[kinds == kind] = torch.cat(encoded.pooler_output)
        expected = model(inputs_embeds=embeddings, position_ids=positions).logits[0]
        set_attention(model)
        torch.testing.assert_close(model(**batch.model_inputs()).logits[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", GLM)
def test_videos_as_images_give_the_logits_of_videos(world_of: Callable[[str], World], name: str) -> None:
    """Its own forward of its own processor's videos: the same positions, and the same logits."""
    world = world_of(name)
    model = world.model()
    model_inputs = tokens_of(world.processor, rows_for(name)[-1])
    kinds = torch.tensor(model_inputs.pop("mm_token_type_ids"))
    inputs = {key: torch.as_tensor(value) for key, value in model_inputs.items()}
    del inputs["attention_mask"]
    assert len(inputs["video_grid_thw"]) == 2
    with torch.no_grad():
        expected = model(**inputs, mm_token_type_ids=kinds).logits[0]
        set_attention(model)
        batch = collate_packs(world.samples[-1:], world.spec)
        torch.testing.assert_close(model(**batch.model_inputs()).logits[0], expected, rtol=0, atol=1e-5)
    positions, _ = model.model.get_rope_index(inputs["input_ids"], kinds, video_grid_thw=inputs["video_grid_thw"])
    assert torch.equal(batch.position_ids[1:, 0], positions[:, 0])


@pytest.mark.parametrize("name", WITH_VIDEOS)
@pytest.mark.parametrize("clip", [(0.0, 0.6), (0.4, None)])
def test_clips_are_loaded(world_of: Callable[[str], World], name: str, clip: tuple[float, float | None]) -> None:
    """Their pixels are those of the same frames in an uncut video."""
    world = world_of(name)
    row = film(0, "<video>?", 1)
    ((whole,),) = encode(world.directory, [row])
    ((sample,),) = encode(world.directory, [dataclasses.replace(row, videos=(MediaRef(None, VIDEOS[1], clip=clip),))])
    (video,) = sample.videos
    moved = dataclasses.replace(whole.videos[0], indices=video.indices, num_tokens=video.num_tokens, grid=video.grid)
    expected = load_media([dataclasses.replace(whole, videos=(moved,))], world.spec)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in load_media([sample], world.spec).items())


def test_resized_frames_are_cached(world_of: Callable[[str], World], tmp_path: Path) -> None:
    world = world_of("glm4v")
    cached_spec = world.spec.with_media_cache(
        MediaCacheOptions(media_cache=str(tmp_path), media_cache_size=10**8), "rows"
    )
    expected = load_media(world.samples, world.spec)
    for hits in (3, 8):  # some of the eight are the same
        pixels = load_media(world.samples, cached_spec)
        assert pixels.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in pixels.items())
        assert cached_spec.media_cache is not None
        assert cached_spec.media_cache.take_reads() == MediaReads(hits, 8 - hits)


@pytest.mark.parametrize("name", ["glm4v", "internvl"])
def test_loading_time_is_measured(world_of: Callable[[str], World], name: str) -> None:
    world = world_of(name)
    for kind, samples, num in (("videos", world.samples[-2:], 2), ("pictures", world.samples[2:5], 3)):
        media, seconds, size, num_samples = _measure_loading(kind, samples, world.spec, SilentProgress())
        assert (media, num_samples) == (num, len(samples) - 1)
        assert seconds > 0
        assert size == sum(len(each.data) for one in samples[1:] for each in (*one.images, *one.videos))


def test_media_larger_than_a_micro_batch_are_reported(world_of: Callable[[str], World], tmp_path: Path) -> None:
    world = world_of("internvl")
    shutil.copytree(world.directory, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "processor_config.json").read_text())
    settings["video_processor"]["size"] = {"height": 84, "width": 84}
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps(settings))
    other = dataclasses.replace(world.spec, model=str(tmp_path / "model"))
    assert load_media(world.samples[-1:], other)["pixel_values"].shape[-1] == 84
    with pytest.raises(ConfigError, match=r"unlike sizes, \[\(56, 56\), \(84, 84\)\]"):
        load_media(world.samples, other)


@pytest.mark.parametrize("name", ["glm4v", "internvl"])
def test_a_video_that_has_changed_is_named(world_of: Callable[[str], World], name: str) -> None:
    world = world_of(name)
    sample = world.samples[-2]
    other = dataclasses.replace(sample.videos[0], data=VIDEOS[1], num_tokens=99)
    with pytest.raises(MediaError, match=r"row 5 of rows\.jsonl\) has changed .* it was 48x32 .* now it is 40x64"):
        load_media([dataclasses.replace(sample, videos=(other,))], world.spec)


@pytest.mark.parametrize("name", ["idefics3", "kimi_k25", "gemma3", "gemma4", "llama4", "mllama"])
def test_trace_with_blank_images_equals_the_forward_pass(world_of: Callable[[str], World], name: str) -> None:
    """Masks of pixels, and grids: a model reads their numbers on its way."""
    if name == "kimi_k25" and not traces_float32_experts():
        pytest.skip("this torch gives no shapes for the products of float32 experts")
    if name == "idefics3" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("its tower takes positions by masks of patches, whose number a trace does not know")
    spec, tokens = world_of(name).spec, RankTokens(computed=200, vision=100)
    with torch.device("meta"):
        model = measured_model(spec.config, adapters=False, recomputes=False)
    batch = traced_batch(spec, tokens, Axes())
    assert 64 <= int((batch.input_ids == spec.pad_ids["image"]).sum()) <= 128
    assert trace_pass(model, spec, tokens) == computed_bytes(spec.config, batch=batch)
    with pytest.raises(ValueError, match="the smallest picture has more than 0 tokens"):
        large_processed(spec, 1, 0)


def test_trace_of_more_pictures_than_half_of_the_tokens(world_of: Callable[[str], World]) -> None:
    batch = traced_batch(world_of("mllama").spec, RankTokens(computed=21, vision=15), Axes())
    assert batch.media["cross_attention_mask"].shape[:3] == (1, 21, 15)


@pytest.mark.parametrize("name", [name for name in TRAINED if not name.startswith("minicpm") and name not in ACROSS])
def test_questions_about_one_image_share_a_prefix(world_of: Callable[[str], World], name: str) -> None:
    """It is looked at once, and every row has its own logits, and its part of the gradients."""
    world = world_of(name)
    rows = [row(index, f"<image>What is it? {index}", 1) for index in range(3)]
    samples = [sample for samples in encode(world.directory, rows) for sample in samples]
    model = world.model()
    set_attention(model)
    pack = PackUnderTest(model, samples, world.spec, torch.float32, min_shared=4)
    assert isinstance(pack.batch, TreeBatch)
    once, thrice = load_media(samples[:1], world.spec), load_media(samples, world.spec)
    assert len(pack.batch.media["pixel_values"]) == len(once["pixel_values"]) < len(thrice["pixel_values"])
    for check in (check_isolation(pack), check_logits(pack), check_prefixes(pack), check_gradients(pack)):
        assert check.error <= check.allowed, check


@pytest.mark.parametrize("name", [*TRAINED, "llava before the last layer"])
def test_every_trained_parameter_has_a_gradient(world_of: Callable[[str], World], name: str) -> None:
    """Processes wait for all of them: what is behind the layer of the features is not trained."""
    name, _, is_before = name.partition(" ")
    world = world_of(name)
    config = copy.deepcopy(world.spec.config)
    if is_before:
        config.vision_feature_layer, config.vision_config.num_hidden_layers = -2, 2
    settings: dict[str, Any] = {"train_type": "full", "freeze_vit": False, "freeze_aligner": False}
    run = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", **settings)
    model = make_trainable(dataclasses.replace(world, spec=InputSpec("", config, world.spec.limits)).model(), run)
    set_attention(model)
    model(**collate_packs(world.samples, world.spec).model_inputs()).logits.sum().backward()
    assert not [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None]
    idle = {key.rsplit(".", 1)[0] for key, p in model.named_parameters() if not p.requires_grad}
    assert any(".layers.1" in key for key in idle) == bool(is_before)


def test_two_ranks_share_a_sequence(world_of: Callable[[str], World], tmp_path: Path) -> None:
    """Logits, loss and every gradient as on one rank, though each picture is looked at by one of them."""
    families = [name for name in TRAINED if name not in UNSHARED]
    worlds = [world for name in families if (world := world_of(name)).spec.family.processor_inputs or name == "glm4v"]
    settings: dict[str, Setting] = {}
    for world in worlds:
        both_kinds = encode(world.directory, [mixed(7)])[0] if world.name in WITH_BOTH else []
        settings[world.name] = world.spec, world.model(), [*world.samples[:3], *both_kinds, *world.samples[3:]]
    run_ranks(
        2,
        check_shared,
        {name: (each, forward_alone(each)) for name, each in settings.items()},
        tmp_path,
        scratch=tmp_path,
    )
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert len(errors) == len(worlds) > 5
    for name, (logits, loss, gradients, moved) in errors.items():
        assert max(logits, loss, gradients) < 1e-5, name  # sums in another order, which depends on the CPU
        assert moved == 0, name


def check_shared(settings: dict[str, tuple[Setting, Found]], folder: Path) -> None:
    """On each rank, one way after the other."""
    dist.init_process_group("gloo")
    splits = [SequenceParallel.on_mesh(axes, "cpu") for axes in (Axes(2, 1, "ring"), Axes(1, 2))]
    errors = {}
    for index, (name, (setting, expected)) in enumerate(settings.items()):
        spec, model, samples = setting
        # Rings do not share layers with windows.
        parallel = splits[1 if getattr(model.config.text_config, "sliding_window", None) else index % 2]
        errors[name] = check_setting(setting, expected, parallel)
        # Text alone: each looks at a blank picture, of which nothing goes anywhere.
        bare = collate_shard(samples[1:2], spec, parallel.split)
        assert bare.media["pixel_values"].numel()
        assert not sum(bare.shard.routes["image"].send_counts)
        aligner = model.get_submodule(spec.family.towers.aligner[0])
        model.zero_grad()
        model(**bare.model_inputs()).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in aligner.parameters())
    if dist.get_rank() == 0:
        (folder / "errors.json").write_text(json.dumps(errors))


@pytest.mark.parametrize("name", TRAINED)
def test_each_model_part_has_a_freeze_option(world_of: Callable[[str], World], name: str) -> None:
    world, flags = world_of(name), {"vision tower": "freeze_vit", "aligner": "freeze_aligner"}
    flags["language model"] = "freeze_llm"

    def bare() -> Any:
        with torch.device("meta"):
            return auto_class(world.spec.config).from_config(copy.deepcopy(world.spec.config))

    model = bare()
    towers = tower_prefixes(model, model.config.model_type)
    text = model.get_decoder()
    assert {towers.part_of(key) for key, module in model.named_modules() if module is text} == {"language model"}
    # peft would adapt experts in the place of layers of the tower that have the same names, which is refused.
    for train_type in ("full",) if "moe" in name else ("full", "lora"):
        for part in flags:
            frozen = {option: option != flags[part] for option in flags.values()}
            config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", train_type=train_type, **frozen)
            if (name, train_type, part) == ("gemma3", "lora", "aligner"):  # a bare matrix
                with pytest.raises(ConfigError, match="no module to adapt"):
                    make_trainable(bare(), config)
                continue
            trained = make_trainable(bare(), config)
            names = [key.removeprefix("base_model.model.") for key, p in trained.named_parameters() if p.requires_grad]
            assert {towers.part_of(key) for key in names} == {part}
    cost = CostModel.of_config(world.spec.config.to_dict())
    assert cost.towers(np.array(4), np.array(0)) > 0


@pytest.mark.parametrize("name", WHOLE)
def test_tokens_of_a_picture_see_each_other_in_both_directions(world_of: Callable[[str], World], name: str) -> None:
    """Packed and padded as in transformers' own attention; without the pictures' places the logits are others."""
    world = world_of(name)
    model = world.model()
    padded = collate_padded(world.samples, world.spec).model_inputs()
    with torch.no_grad():
        rows = model(**padded).logits
        causal = model(**{key: value for key, value in padded.items() if "token_type" not in key}).logits
        set_attention(model)
        batch = collate_packs(world.samples, world.spec)
        inputs = batch.model_inputs()
        packed = torch.split(model(**inputs).logits[0], batch.lengths)
        assert inputs.pop("whole_pictures") is batch.pictures
        without = torch.split(model(**inputs).logits[0], batch.lengths)
    for number, sample in enumerate(world.samples):
        row = rows[number, : sample.length]
        torch.testing.assert_close(packed[number], row, rtol=0, atol=2e-5)
        torch.testing.assert_close(without[number], causal[number, : sample.length], rtol=0, atol=2e-5)
        assert bool(sample.images or sample.videos) == bool((without[number] - row).abs().max() > 1e-3)


def test_small_gemma_4_models_are_causal(world_of: Callable[[str], World]) -> None:
    world = world_of("gemma4")
    config = copy.deepcopy(world.spec.config)
    config.text_config.use_bidirectional_attention = None
    spec = InputSpec(world.spec.model, config, world.spec.limits)
    model = dataclasses.replace(world, spec=spec).model()
    set_attention(model)
    pack = PackUnderTest(model, world.samples, spec, torch.float32)
    assert isinstance(pack.batch, PackedBatch)
    assert pack.batch.pictures is None
    for check in (check_isolation(pack), check_logits(pack), check_gradients(pack)):
        assert check.error <= check.allowed, check


@pytest.mark.parametrize("name", ACROSS)
def test_tokens_see_the_pictures_that_the_processor_says(world_of: Callable[[str], World], name: str) -> None:
    """Alone as by the processor's mask; and other samples' pictures have no effect, nor a place in the softmax."""
    world = world_of(name)
    rows = [*rows_for(name), row(5, "<image><image>Both?", 1, 0), row(6, "<image>? <image><image>?", 0, 1, 2)]
    samples = [sample for samples in encode(world.directory, rows) for sample in samples]
    model = world.model()
    expected = []
    for each, sample in zip(rows, samples, strict=True):
        inputs = {key: torch.as_tensor(value) for key, value in tokens_of(world.processor, each).items()}
        del inputs["attention_mask"]
        with torch.no_grad():
            expected.append(model(**inputs).logits[0])
        batch = collate_packs([sample], world.spec, frozenset())
        mask = inputs.get("cross_attention_mask")
        assert (mask is None) == (batch.pictures is None) == (not each.images)
        assert mask is None or torch.equal(batch.media["cross_attention_mask"].long(), mask)
    set_attention(model)
    batch = collate_packs(samples, world.spec)
    with torch.no_grad():
        packed = torch.split(model(**batch.model_inputs()).logits[0], batch.lengths)
    for logits, alone in zip(packed, expected, strict=True):
        torch.testing.assert_close(logits, alone, rtol=0, atol=2e-5)
    pack = PackUnderTest(model, samples, world.spec, torch.float32)
    for check in (check_isolation(pack), check_logits(pack), check_gradients(pack)):
        assert check.error <= check.allowed, check
    hidden = batch.model_inputs()
    del hidden["cross_pictures"]
    with pytest.raises(LeakError, match="was not told which pictures belong to which sample"):
        model(**hidden)


@pytest.mark.parametrize("name", ACROSS)
def test_options_that_would_mix_pictures_are_refused(world_of: Callable[[str], World], name: str) -> None:
    world = world_of(name)
    with pytest.raises(ConfigError, match=f"--packing false: text of a {name} model"):
        collate_padded(world.samples, world.spec)
    twice = collate_tree([world.samples[0]] * 2, world.spec, min_shared=4)
    assert not isinstance(twice, TreeBatch)
    config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", share_prefix="true", freeze_vit=True)
    with pytest.raises(UnsupportedModelError, match="--share-prefix true cannot be combined with a model with cross"):
        conflicts_of_sharing(config, world.spec.config.to_dict())
    assert required_towers(world.spec, config) == {"vision"}


@pytest.mark.parametrize("name", UNSHARED)
def test_sequences_that_ranks_cannot_share_are_refused(world_of: Callable[[str], World], name: str) -> None:
    reason = f"--sequence-parallel-size: in a {name} model, {UNSHARED[name]}"
    with pytest.raises(UnsupportedModelError, match=reason):
        refuse_unshareable_sequences(world_of(name).spec.config.to_dict(), 2)


def test_image_with_several_placeholder_runs_is_one_medium(world_of: Callable[[str], World]) -> None:
    """Idefics3 has marks between a picture's tiles: nothing cuts there, neither truncation nor a shared prefix."""
    world = world_of("idefics3")
    long = row(0, "<image>" + "word " * 30, 1)
    num_tokens = world.samples[2].images[0].num_tokens
    for length in (90, 70):
        ((sample,),) = encode(world.directory, [long], max_length=length, truncation_strategy="left")
        assert sample.num_truncated
        pads = int((sample.input_ids == world.spec.pad_ids["image"]).sum())
        assert pads == num_tokens * len(sample.images)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("internvl", "<ref>a dog</ref><box>[[100, 250, 500, 500]]</box>"), ("glm4v", "a dog[100, 250, 500, 500]")],
)
def test_boxes_have_the_format_of_the_family(world_of: Callable[[str], World], name: str, expected: str) -> None:
    world, media = world_of(name), (MediaRef(None, PICTURES[0]),)
    turns = Turn("user", "<image>Where?"), Turn("assistant", "<ref-object><bbox>")
    dog = Objects(("a dog",), ((Region((10.0, 15.0, 50.0, 30.0)),),))
    marked = Sample((turns[0], Turn("assistant", NAME_MARK + BOX_MARK)), media, "rows.jsonl", 0, objects=dog)
    spelled = Sample((turns[0], Turn("assistant", expected)), media, "rows.jsonl", 1)
    ((written,), (same,)) = encode(world.directory, [marked, spelled])
    answer_ids = written.input_ids[written.turns[0] : written.turns[1]]
    decode = world.processor.tokenizer.decode
    assert decode(answer_ids).removesuffix("<|im_end|>") == expected
    np.testing.assert_array_equal(written.input_ids, same.input_ids)
    assert [decode([token]) for token in answer_ids[:2]] == (["<ref>", "a"] if name == "internvl" else ["a", " do"])
    spec = EncodeSpec(model=str(world.directory), max_length=10_000, norm_bbox="none")
    if name == "internvl":
        with pytest.raises(ConfigError, match="does not know how the processor of internvl models"):
            Encoder(spec, ModelFiles.load(str(world.directory)))


def test_changed_image_is_named(world_of: Callable[[str], World]) -> None:
    world = world_of("internvl")
    (image,) = world.samples[0].images
    other = dataclasses.replace(image, data=PICTURES[2])
    with pytest.raises(MediaError, match=r"row 0 of rows\.jsonl\) has changed .* it was 100x60 .* now it is 30x30"):
        load_processed([dataclasses.replace(world.samples[0], images=(other,))], world.spec)


def test_unsupported_settings_are_refused_by_name(world_of: Callable[[str], World], tmp_path: Path) -> None:
    world = world_of("internvl")
    config = copy.deepcopy(world.spec.config)
    config.text_config = Gemma2Config(num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match=r"internvl uses soft-capped scores"):
        refuse_unsupported(config)
    (tmp_path / "config.json").write_text('{"model_type": "paligemma", "vision_config": {}, "text_config": {}}')
    with pytest.raises(ConfigError, match=r"'paligemma'.* attention in both directions is not limited"):
        InputSpec.load(str(tmp_path), world.spec.limits)


MODES = ("RGB", "L", "LA", "P", "RGBA", "CMYK", "1", "I;16")


@given(
    name=st.sampled_from([*TRAINED, "qwen"]),
    height=st.integers(2, 600),
    width=st.integers(2, 600),
    mode=st.sampled_from(MODES),
    orientation=st.integers(1, 8),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_skipped_pixel_copies_change_no_output(
    world_of: Callable[[str], World], name: str, height: int, width: int, mode: str, orientation: int, seed: int
) -> None:
    original = Qwen2VLImageProcessor() if name == "qwen" else world_of(name).processor.image_processor
    changed = copy.copy(original)
    skip_pixel_copies(changed)
    assert ("process_image" in vars(changed)) == isinstance(original, TorchvisionBackend)
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture = Image.fromarray(levels[..., 0] > 99) if mode == "1" else Image.fromarray(levels)
    picture = Image.fromarray(levels[..., 0].astype(np.uint16) * 257) if mode == "I;16" else picture.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.save(file := io.BytesIO(), "TIFF" if mode == "CMYK" else "PNG", exif=exif)
    loaded = load_image(None, file.getvalue())
    try:
        expected = original(images=[[loaded]], return_tensors="pt")
    except (ValueError, ZeroDivisionError) as error:
        with pytest.raises(type(error)):
            changed(images=[[loaded]], return_tensors="pt")
        return
    outputs = changed(images=[[loaded]], return_tensors="pt")
    assert outputs.keys() == expected.keys()
    for key, tensor in expected.items():
        tensors = tensor if isinstance(tensor, list) else [tensor]
        others = outputs[key] if isinstance(tensor, list) else [outputs[key]]
        for one, other in zip(tensors, others, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), key
