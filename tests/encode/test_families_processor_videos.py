"""Videos through a model's own processor: frames, text and tokens equal its own."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.video_utils import VideoMetadata

from packtool.encode.encoded import EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.encoder import Encoder
from packtool.encode.families import family_of
from packtool.encode.families.processor import ProcessorVideos
from packtool.encode.families.qwen_vl import clip_frames
from packtool.encode.media_spans import MediaTokens, media_spans, visual_media
from packtool.media.files import MediaProblem
from packtool.media.video import VideoSize, load_video, measure_video
from packtool.rows.sample import Dropped, MediaRef, Sample, Turn
from tests.encode.conftest import encoder_for
from tests.encode.other_families import model_of, tokens_of
from tests.encode.test_prepared import prepared, values
from tests.media.clips import write_clip

BY_SIZE = ("glm4v", "glm46v", "internvl", "gemma4", "exaone4_5", "llava_onevision", "smolvlm")
BY_SIZE += ("minicpmv4_6", "hyperclovax_vision_v2")
"""Whose videos have tokens by their size and number of frames alone."""
NAMES = (*BY_SIZE, "video_llama_3")
OWN_RATE = ("glm46v", "smolvlm", "minicpmv4_6")
"""Whose processors do not sample at a given number of frames per second."""
WITHOUT_TIMES = ("internvl", "exaone4_5", "llava_onevision", "minicpmv4_6", "hyperclovax_vision_v2")
"""Whose processors write no times of frames."""
ASKED: dict[str, tuple[ProcessorVideos, Any]] = {}


@pytest.fixture(scope="module")
def directory_of(drawn_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda name: model_of(name, drawn_data, folder)[0]


@pytest.fixture(scope="module")
def encoder_of(directory_of: Callable[[str], Path]) -> Callable[..., Encoder]:
    return cache(lambda name, **spec: encoder_for(directory_of(name), **spec))


@pytest.fixture(scope="module", autouse=True)
def processor_videos(directory_of: Callable[[str], Path], drawn_data: Path) -> None:
    for name in NAMES:
        processor = model_of(name, drawn_data, directory_of(name).parent)[1]
        ASKED[name] = ProcessorVideos(processor, pad_of(name, processor)), processor


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[MediaRef]:
    folder = tmp_path_factory.mktemp("clips")
    files = [write_clip(folder / f"{n}.mp4", size=(32, 48 + 16 * n), num_frames=30 + 60 * n) for n in (0, 1)]
    return [MediaRef(str(file)) for file in files]


@pytest.fixture(scope="module")
def small(clips: list[MediaRef], tmp_path_factory: pytest.TempPathFactory) -> dict[str, MediaRef]:
    """A video, one of two frames, and a picture of as many tokens as a frame where pictures have tiles."""
    folder = tmp_path_factory.mktemp("small")
    Image.new("RGB", (56, 56), "red").save(folder / "a.png")
    picture = MediaRef(str(folder / "a.png"))
    return {"<image>": picture, "<video>": clips[0], "<short>": MediaRef(None, frames=(picture,) * 2)}


def pad_of(name: str, processor: Any) -> str:
    """The placeholder token of videos: that of pictures, where frames are written as such."""
    has_own_pad = family_of({"model_type": name}).video_outputs
    return str(processor.video_token if has_own_pad else processor.image_token)


def process(processor: Any, frames: Any, metadata: VideoMetadata) -> Any:
    """What a processor makes of a video, with the text that it writes, and the frames that it samples."""
    return processor(
        text=[processor.video_token],
        videos=[frames],
        return_text_replacement_offsets=True,
        return_metadata=True,
        videos_kwargs={"return_tensors": "pt", "video_metadata": [metadata]},
        text_kwargs={"return_tensors": None},
    )


def film(question: str, *videos: MediaRef, answer: str = "It is.") -> Sample:
    return Sample((Turn("user", question), Turn("assistant", answer)), (), "rows.jsonl", 0, videos=videos)


@settings(max_examples=12)
@given(
    name=st.sampled_from(BY_SIZE),
    num_frames=st.integers(1, 90),
    fps=st.sampled_from([2.0, 12.5, 24000 / 1001, 60.0]),
    sides=st.tuples(st.integers(20, 90), st.integers(20, 90)),
)
def test_frames_and_text_equal_those_of_the_processor(
    name: str, num_frames: int, fps: float, sides: tuple[int, int]
) -> None:
    """transformers samples the frames of a complete video; packtool needs only its size and rate."""
    encoding, processor = ASKED[name]
    size = VideoSize(*sides, num_frames, fps, has_sound=False)
    metadata = VideoMetadata(num_frames, fps, sides[1], sides[0], num_frames / fps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("packtool.media.video.measure_video", lambda ref: size)
        refused = ""
        try:
            inputs = process(processor, np.zeros((num_frames, *sides, 3), np.uint8), metadata)
        except ValueError as error:
            refused = str(error)
        if refused:
            with pytest.raises(MediaProblem) as raised:
                encoding.measure(MediaRef("a.mp4"))
            assert refused in raised.value.detail
            return
        video = encoding.measure(MediaRef("a.mp4"))
    ((written,),) = inputs["text_replacement_offsets"]
    segments = encoding.segments(video)
    texts = [segment if isinstance(segment, str) else segment.token * segment.length for segment in segments]
    assert "".join(texts) == written["replacement"]
    assert video.num_tokens == written["replacement"].count(pad_of(name, processor))
    if "video_metadata" in inputs:
        assert list(video.indices) == list(inputs["video_metadata"][0].frames_indices)
    if "video_grid_thw" in inputs:
        assert list(video.grid) == np.ravel(inputs["video_grid_thw"]).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_videos(name: str, encoder_of: Callable[..., Encoder], data: Path) -> None:
    folder = data / "raw/llama-factory/data/mllm_demo_data"
    sample = film("<video>What <|image|> is <video>?", *(MediaRef(str(folder / file)) for file in ("4.mp4", "2.avi")))
    ((encoded,),) = encoder_of(name, max_length=20_000).encode([sample])  # type: ignore[misc]
    plain_sample = replace(sample, turns=(Turn("user", "<video>What [] is <video>?"), sample.turns[1]))
    expected = tokens_of(ASKED[name][1], plain_sample)["input_ids"][0]
    decode = ASKED[name][1].tokenizer.decode
    assert decode(encoded.input_ids).replace("What <|image|> is", "What [] is") == decode(expected)
    pad = encoder_of(name, max_length=20_000).media_tokens.pads["video"]
    # What a row says is text, also where it says what stands for a picture.
    assert int((encoded.input_ids == pad).sum()) == sum(video.num_tokens for video in encoded.videos)


@pytest.mark.parametrize("name", NAMES)
def test_truncation_never_splits_a_video(
    name: str, encoder_of: Callable[..., Encoder], directory_of: Callable[[str], Path], clips: list[MediaRef]
) -> None:
    long = film("<video> and <video>" + "word " * 30, *clips)
    ((full_sample,),) = encoder_of(name).encode([long])  # type: ignore[misc]
    pad = encoder_of(name).media_tokens.pads["video"]
    each, nums_removed = [video.num_tokens for video in full_sample.videos], set()
    step = full_sample.length // 12
    for length in range(full_sample.length - 1, 12, -step):
        limited_encoder = encoder_for(
            directory_of(name), truncation_strategy="left", media_overflow="trim", max_length=length
        )
        (result,) = limited_encoder.encode([long])
        if isinstance(result, Dropped):
            assert result.reason == "no_target_tokens"
            continue
        (sample,) = result
        num_gone = 2 - len(sample.videos)
        assert sample.num_truncated == full_sample.length - sample.length
        assert sample.videos == full_sample.videos[num_gone:]
        assert int((sample.input_ids == pad).sum()) == sum(each[num_gone:])
        nums_removed.add(num_gone)
    assert nums_removed >= {0, 1}


@pytest.mark.parametrize("name", NAMES)
def test_pretokenized_rows_are_encoded(name: str, encoder_of: Callable[..., Encoder], clips: list[MediaRef]) -> None:
    row = film("<video>What? And <video>?", *clips)
    (expected,) = encoder_of(name).encode([row])
    assert isinstance(expected, list)
    (result,) = encoder_of(name).encode([prepared(row, expected)])
    assert isinstance(result, list), result
    assert list(map(values, result)) == list(map(values, expected))
    (dropped,) = encoder_of(name).encode([replace(prepared(row, expected), videos=clips[:1])])
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "media_tokens"


def test_dropped_videos_state_the_reason(encoder_of: Callable[..., Encoder], clips: list[MediaRef]) -> None:
    limited = film("<video>", replace(clips[0], limits=(("max_frames", 4),)))
    for name in ("glm4v", "internvl"):
        (dropped,) = encoder_of(name).encode([limited])
        assert isinstance(dropped, Dropped)
        assert (dropped.reason, "its row has max_frames" in dropped.detail) == ("media_unsupported", True), dropped


_PARTS = st.lists(st.sampled_from(["<image>", "<video>", "<short>"]), min_size=2, max_size=6)
_TEXTS = st.lists(st.sampled_from(["", "\n", " and ", "Frame1: ", "\nFrame2: "]), min_size=7, max_size=7)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(NAMES), parts=_PARTS, texts=_TEXTS, max_length=st.sampled_from([60, 100, 1000]))
def test_pictures_and_videos_of_a_row_are_found_in_their_order(
    name: str, parts: list[str], texts: list[str], max_length: int, small: dict[str, MediaRef], encoder_of: Any
) -> None:
    """Whatever the text around them, also after truncation; otherwise the row is dropped."""
    question = "".join(text + part for text, part in zip(texts, [*parts, ""], strict=False))
    row = film(question.replace("<short>", "<video>"), *(small[part] for part in parts if part != "<image>"))
    row = replace(row, images=(small["<image>"],) * parts.count("<image>"))
    encoder = encoder_of(name, max_length=max_length, truncation_strategy="left", media_overflow="trim")
    (result,) = encoder.encode([row])
    if isinstance(result, Dropped):
        assert result.reason in ("media_unsupported", "no_target_tokens")
        is_ambiguous = name in ("internvl", "smolvlm") and "do not show the order" in result.detail
        assert result.reason != "media_unsupported" or is_ambiguous
        return
    (sample,) = result
    is_video = [part != "<image>" for part in parts][len(parts) - len(sample.media) :]
    assert [isinstance(medium, EncodedVideo) for medium in visual_media(sample, encoder.media_tokens)] == is_video
    starts = [span.start for span in media_spans(sample, encoder.media_tokens)]
    assert starts == sorted(starts)


def test_ambiguous_order_of_pictures_and_videos_drops_the_row(
    encoder_of: Callable[..., Encoder], small: dict[str, MediaRef]
) -> None:
    """InternVL writes a picture of one tile like a frame; GLM marks the beginning and the end of a video."""
    rows = [
        replace(film(f"{first} {second}", small["<video>"]), images=(small["<image>"],))
        for first, second in (("<image>", "<video>"), ("<video>", "<image>"))
    ]
    short = replace(film("<video> <image>", small["<short>"]), images=(small["<image>"],))
    for name in ("glm4v", "internvl"):
        results = encoder_of(name).encode([*rows, short])
        assert [isinstance(result, Dropped) for result in results] == [False, False, name == "internvl"]


def test_pretokenized_rows_with_pictures_and_videos(
    encoder_of: Callable[..., Encoder], small: dict[str, MediaRef]
) -> None:
    row = replace(film("<video> and <image> and <video>", *[small["<video>"]] * 2), images=(small["<image>"],))
    for name in NAMES:
        if name == "smolvlm":
            continue
        (expected,) = encoder_of(name).encode([row])
        assert isinstance(expected, list), expected
        (result,) = encoder_of(name).encode([prepared(row, expected)])
        if name == "internvl":
            assert isinstance(result, Dropped)
            assert (result.reason, "was tokenized elsewhere" in result.detail) == ("media_unsupported", True)
            continue
        assert isinstance(result, list), result
        assert list(map(values, result)) == list(map(values, expected))
    (expected,) = encoder_of("glm4v").encode([row])
    unmarked = prepared(row, expected)  # type: ignore[arg-type]
    assert unmarked.tokens is not None
    marks = encoder_of("glm4v").media_tokens.video_marks
    ids = np.where(np.isin(unmarked.tokens.ids, marks), unmarked.tokens.ids[0], unmarked.tokens.ids)
    (dropped,) = encoder_of("glm4v").encode([replace(unmarked, tokens=replace(unmarked.tokens, ids=ids))])
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, "around the row's videos" in dropped.detail) == ("media_tokens", True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fps", [None, 1.0, 3.0])
@pytest.mark.parametrize("clip", [None, (0.4, 2.9), (1.0, None)])
def test_clips_and_frames_per_second_of_a_row(
    name: str, fps: float | None, clip: tuple[float, float | None] | None, clips: list[MediaRef]
) -> None:
    """As the processor samples a video of the clip's frames alone at this rate; times count from the file's start."""
    encoding, processor = ASKED[name]
    ref = replace(clips[1], clip=clip, limits=() if fps is None else (("fps", fps),))
    if fps is not None and name in OWN_RATE:
        with pytest.raises(MediaProblem, match="its row has fps"):
            encoding.measure(ref)
        return
    size = measure_video(clips[1])
    first, num_frames = (0, size.num_frames) if clip is None else clip_frames(clip, size.num_frames, size.fps)
    frames = load_video(clips[1].path, None, (), range(first, first + num_frames))
    if fps is not None:
        processor = copy.deepcopy(processor)
        processor.video_processor.fps, processor.video_processor.num_frames = fps, None
    metadata = VideoMetadata(num_frames, size.fps, size.width, size.height, num_frames / size.fps)
    outputs = process(processor, frames, metadata)
    ((written,),) = outputs["text_replacement_offsets"]
    video = encoding.measure(ref)
    if "video_metadata" in outputs:
        assert list(video.indices) == [first + int(index) for index in outputs["video_metadata"][0].frames_indices]
    assert first <= video.indices[0] <= video.indices[-1] < first + num_frames
    assert video.num_tokens == written["replacement"].count(pad_of(name, processor))
    texts = [segment for segment in encoding.segments(video) if isinstance(segment, str)]
    if first == 0 or name in WITHOUT_TIMES:
        assert all(text in written["replacement"] for text in texts)
    else:
        seconds = int(video.indices[0] / size.fps)
        assert (f"00:{seconds:02d}" if name in ("gemma4", "smolvlm") else str(seconds)) in texts[0]


def test_all_images_given_as_a_video_are_frames(encoder_of: Callable[..., Encoder], drawn_data: Path) -> None:
    frame = MediaRef(str(drawn_data / "raw/llama-factory/data/mllm_demo_data/1.jpg"))
    row = film("<video>", MediaRef(None, frames=(frame,) * 5, fps=1.0))
    for name, steps in (("glm4v", 3), ("internvl", 5)):
        ((sample,),) = encoder_of(name, max_length=9000).encode([row])  # type: ignore[misc]
        assert sample.videos[0].indices == (0, 1, 2, 3, 4)
        assert sample.videos[0].num_tokens % steps == 0


def test_placeholders_may_be_ordinary_tokens(
    encoder_of: Callable[..., Encoder], directory_of: Callable[[str], Path], clips: list[MediaRef], tmp_path: Path
) -> None:
    other = shutil.copytree(directory_of("glm4v"), tmp_path / "model")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] &= "_of_" not in token["content"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = json.loads((other / "tokenizer_config.json").read_text())
    plain_values = {key: value for key, value in named.items() if "_of_" not in str(value)}
    (other / "tokenizer_config.json").write_text(json.dumps(plain_values))
    row = film("<video> and <video>", *clips)
    ((expected,),), ((encoded,),) = (encoder.encode([row]) for encoder in (encoder_of("glm4v"), encoder_for(other)))
    np.testing.assert_array_equal(encoded.input_ids, expected.input_ids)


@pytest.mark.parametrize(
    ("name", "file", "edit", "detail"),
    [
        ("exaone4_5", "config.json", {"video_token_id": 5}, "no common video token"),
        ("exaone4_5", "config.json", {"video_token_id": None}, "no common video token"),
        ("minicpmv4_6", "processor_config.json", {"video_processor": {"stack_frames": 2}}, "set stack_frames to 1"),
    ],
)
def test_settings_without_videos(
    directory_of: Callable[[str], Path],
    clips: list[MediaRef],
    tmp_path: Path,
    name: str,
    file: str,
    edit: dict[str, Any],
    detail: str,
) -> None:
    other = shutil.copytree(directory_of(name), tmp_path / "model")
    settings = json.loads((other / file).read_text())
    for key, value in edit.items():
        settings[key] = settings[key] | value if isinstance(value, dict) else value
    settings = {key: value for key, value in settings.items() if value is not None}
    (other / file).write_text(json.dumps(settings))
    (dropped,) = encoder_for(other).encode([film("<video>", clips[0])])
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "media_unsupported"
    assert detail in dropped.detail


def test_videos_without_token_compression_are_not_decoded(
    directory_of: Callable[[str], Path], clips: list[MediaRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(directory_of("video_llama_3"), tmp_path / "model")
    settings = json.loads((other / "processor_config.json").read_text())
    settings["video_processor"]["use_token_compression"] = False
    (other / "processor_config.json").write_text(json.dumps(settings))
    monkeypatch.delattr("packtool.media.video.load_video")
    ((sample,),) = encoder_for(other, max_length=20_000).encode([film("<video>", clips[0])])  # type: ignore[misc]
    (video,) = sample.videos
    assert video.num_tokens == np.prod(video.grid) // 4 > 0
    pad = json.loads((other / "config.json").read_text())["video_token_id"]
    assert int((sample.input_ids == pad).sum()) == video.num_tokens


def test_results_are_kept_for_videos_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of videos in rows would keep the videos' bytes."""
    processor = ASKED["video_llama_3"][1]
    encoding = ProcessorVideos(processor, pad_of("video_llama_3", processor))
    size = VideoSize(28, 28, 4, 1.0, has_sound=False)
    loaded: list[str | None] = []

    def load(path: str | None, *_: object) -> np.ndarray[Any, Any]:
        loaded.append(path)
        return np.zeros((4, 28, 28, 3), np.uint8)

    monkeypatch.setattr("packtool.media.video.measure_video", lambda ref: size)
    monkeypatch.setattr("packtool.media.video.load_video", load)
    for make_ref, num_loaded in ((lambda n: MediaRef(f"{n}.mp4"), 20), (lambda n: MediaRef(None, bytes([n])), 21)):
        loaded.clear()
        for number in (*range(20), 0):
            encoding.measure(make_ref(number))
        assert len(loaded) == num_loaded


def test_unusable_template_for_videos_drops_the_row(directory_of: Callable[[str], Path], clips: list[MediaRef]) -> None:
    encoder = encoder_for(directory_of("smolvlm"))
    encoder._media.video_template = "{{ messages | length }}"
    (dropped,) = encoder.encode([film("<video>", clips[0])])
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "template_refused"
    assert "chat template for videos" in dropped.detail


def test_order_of_thousands_of_pictures_and_a_video() -> None:
    image = EncodedImage("a.png", None, 8, 8, grid=(1, 1, 1), num_tokens=1)
    video = EncodedVideo("a.mp4", None, (), 8, 8, 2, 1.0, (0, 1), (), 1.0, num_tokens=4)
    ids = np.array([7, 1] * 3000 + [7, 7, 1] * 2, np.int32)
    none = np.zeros(0, np.int32)
    sample = EncodedSample(ids, ids, none, (image,) * 3000, None, "", 0, videos=(video,))
    spans = media_spans(sample, MediaTokens({"image": 7, "video": 7}))
    assert [span.medium for span in spans] == [*sample.images, video]
    assert (spans[-1].start, spans[-1].stop) == (6000, 6005)


def test_processor_without_sampling_gets_all_frames(drawn_data: Path, clips: list[MediaRef]) -> None:
    encoding, processor = ASKED["internvl"]
    videos = processor.video_processor
    assert encoding.warnings == ()
    try:
        videos.do_sample_frames = False
        assert "all frames of a video are taken" in encoding.warnings[0]
        assert encoding.measure(clips[0]).indices == tuple(range(30))
    finally:
        videos.do_sample_frames = True


def test_times_of_frames_are_written_by_the_processor(encoder_of: Callable[..., Encoder], drawn_data: Path) -> None:
    """GLM-4.1V writes the times; InternVL numbers the frames, so times change nothing."""
    frame = MediaRef(str(drawn_data / "raw/llama-factory/data/mllm_demo_data/1.jpg"))
    plain = film("<video>", MediaRef(None, frames=(frame,) * 4))
    timed = film("<video>", MediaRef(None, frames=(frame,) * 4, milliseconds=(0, 1000, 7000, 9000)))
    for name, is_written in (("glm4v", True), ("internvl", False)):
        encoder = encoder_of(name, max_length=9000)
        ((without,), (sample,)) = encoder.encode([plain, timed])  # type: ignore[misc]
        assert sample.videos[0].num_tokens == without.videos[0].num_tokens
        texts = [encoder._tokenizer.decode(each.input_ids.tolist()) for each in (without, sample)]
        assert (texts[0] != texts[1]) == is_written
        assert ("7" in texts[1]) == is_written
