"""Media of the thinkers of Qwen2.5-Omni and Qwen3-Omni.

Sound becomes mel frames and these become tokens. With ``USE_AUDIO_IN_VIDEO`` a video's sound track is interleaved with
its frames: Qwen2.5-Omni takes chunks of two seconds of frames, then of sound; Qwen3-Omni puts every step of frames
before the first sound that is not earlier. Mirrors the processors of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

from packtool.config.data import MediaOptions
from packtool.encode.encoded import EncodedAudio, EncodedVideo
from packtool.encode.families.qwen_vl import QwenVL, image_limits, video_limits
from packtool.encode.families.record import (
    AudioLimits,
    BoxForm,
    Family,
    MediaLimits,
    MediaSegment,
    Medium,
    TokenRun,
    Towers,
    VideoLimits,
    thinker_of,
)
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.media.files import MediaProblem, label
from packtool.rows.sample import MediaKind, MediaRef

_FRAME_TOKENS = (128, 768)  # set by the processors' code, which ignores the settings
_DEFAULT_MAX_SECONDS = 300  # of sound, as in the settings of Qwen2.5-Omni
_MIN_SAMPLES = 201  # the feature extractor mirrors half a window at each end
_TOKENS = ("image", "video", "audio", "vision_bos", "vision_eos", "audio_bos", "audio_eos")


class QwenOmni(QwenVL):
    """Media of the Omni families; the family's ``is_qwen3`` determines how sounds are counted and interleaved."""

    def __init__(self, files: ModelFiles, options: MediaOptions, family: Family) -> None:
        self._is_qwen3 = family.is_qwen3
        self._images = image_limits(files.processor, options)
        self._videos = video_limits(files.video_processor, options, is_qwen3=False, frame_tokens=_FRAME_TOKENS)
        self._audios = _audio_limits(files, options, self._is_qwen3)
        self.limits = MediaLimits(self._images, self._videos, self._audios)
        variables = files.template_variables
        if missing := [f"{name}_token" for name in _TOKENS if f"{name}_token" not in variables]:
            message = f"tokenizer_config.json does not have {', '.join(missing)}"
            raise ConfigError(message, "Take tokenizer_config.json from the model's own repository.")
        image, video, audio, *marks = (variables[f"{name}_token"] for name in _TOKENS)
        self._pads = {"image": image, "video": video, "audio": audio}
        self._opening, self._closing, self._audio_opening, self._audio_closing = marks
        self.control_tokens = (*marks[:2], *self._pads.values(), *marks[2:])

    def measure(self, kind: MediaKind, ref: MediaRef) -> Medium:
        return self._measure_sound(ref) if kind == "audio" else super().measure(kind, ref)

    def _measure_sound(self, ref: MediaRef) -> EncodedAudio:
        from packtool.media.audio import measure_audio  # here, because most rows need no PyAV

        limits = self._audios
        num_samples = measure_audio(ref, limits.sampling_rate)
        full, rest = divmod(num_samples, limits.hop_length)
        num_features = full if self._is_qwen3 else full + bool(rest)
        if limits.max_features is not None:
            num_features = min(num_features, limits.max_features)
        num_tokens = num_sound_tokens(num_features, is_qwen3=self._is_qwen3)
        if num_samples < _MIN_SAMPLES or num_tokens < 1:
            raise MediaProblem("media_size", f"{label(ref)}: the sound is too short ({num_samples} samples)")
        return EncodedAudio(ref.path, ref.data, num_samples, num_features, num_tokens)

    def _sampled_fps(self, num_frames: int, fps: float, num_taken: int, limits: VideoLimits) -> float:
        return limits.fps  # Omni's processors use the requested rate, not that of the sampled frames

    def _sound_track(self, ref: MediaRef) -> EncodedAudio | None:
        if not self._audios.in_video:
            return None
        if ref.clip is not None:
            detail = "a clip whose sound is interleaved in (USE_AUDIO_IN_VIDEO); cut it into a file of its own"
            raise MediaProblem("media_unsupported", f"{label(ref)}: {detail}")
        sound = self._measure_sound(ref)
        return EncodedAudio(None, None, sound.num_samples, sound.num_features, sound.num_tokens)

    def segments(self, medium: Medium, number: int = 0) -> list[MediaSegment]:
        audio_opening, audio_closing = TokenRun(self._audio_opening), TokenRun(self._audio_closing)
        if isinstance(medium, EncodedAudio):
            return [audio_opening, TokenRun(self._pads["audio"], medium.num_tokens), audio_closing]
        if not isinstance(medium, EncodedVideo) or medium.audio is None:
            return super().segments(medium, number)
        pads_per_step = medium.num_tokens // medium.grid[0]
        times = [i * medium.seconds_per_grid * self._audios.tokens_per_second for i in range(medium.grid[0])]
        if self._is_qwen3:
            interleaved = _interleave_by_time(times, pads_per_step, medium.audio.num_tokens)
        else:
            tokens_per_chunk = int(self._audios.tokens_per_second * self._audios.seconds_per_chunk)
            interleaved = _interleave_in_chunks(times, pads_per_step, medium.audio.num_tokens, tokens_per_chunk)
        pads = [TokenRun(self._pads[kind], count) for kind, count in interleaved if count]
        return [TokenRun(self._opening), audio_opening, *pads, audio_closing, TokenRun(self._closing)]


def _audio_limits(files: ModelFiles, options: MediaOptions, is_qwen3: bool) -> AudioLimits:
    """Return the limits on sounds, from the settings of the feature extractor and the thinker's configuration."""
    settings = files.audio_processor
    thinker = thinker_of(files.config)  # an Omni model without its speech output
    sampling_rate = int(settings.get("sampling_rate", 16000))
    if options.sampling_rate is not None and options.sampling_rate != sampling_rate:
        raise ConfigError(
            f"--sampling-rate {options.sampling_rate} (SAMPLING_RATE): the model's feature extractor needs "
            f"{sampling_rate}",
            "Leave it out: sounds of any rate are resampled.",
        )
    hop_length = int(settings.get("hop_length", 160))
    max_seconds = float(settings.get("chunk_length") or _DEFAULT_MAX_SECONDS)  # of a sound
    max_samples = int(settings.get("n_samples") or max_seconds * sampling_rate)
    default_tokens_per_second = 13 if is_qwen3 else 25  # the defaults of transformers' processors
    return AudioLimits(
        sampling_rate=sampling_rate,
        hop_length=hop_length,
        max_features=None if is_qwen3 else max_samples // hop_length,  # Qwen3's processor keeps sounds of any length
        in_video=bool(options.use_audio_in_video),
        tokens_per_second=float(thinker.get("position_id_per_seconds") or default_tokens_per_second),
        seconds_per_chunk=float(thinker.get("seconds_per_chunk") or 2),
    )


def num_sound_tokens(num_features: int, *, is_qwen3: bool) -> int:
    """Return the number of tokens of a sound with ``num_features`` mel frames.

    Qwen3-Omni applies three convolutions of stride 2 to each chunk of 100 mel frames, which gives 13 tokens for a full
    chunk; Qwen2.5-Omni applies one convolution of stride 2, and takes the mean of two frames.
    """
    if not is_qwen3:
        return ((num_features - 1) // 2 + 1 - 2) // 2 + 1
    chunks, rest = divmod(num_features, 100)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + 13 * chunks


def _interleave_by_time(times: list[float], pads_per_step: int, num_sounds: int) -> Iterator[tuple[MediaKind, int]]:
    """Yield (kind, number of tokens) in Qwen3-Omni's order, by the steps' ``times`` in tokens of sound."""
    num_written = 0
    for time in times:
        num_before = min(math.ceil(time), num_sounds) - num_written
        if num_before > 0:
            yield "audio", num_before
            num_written += num_before
        yield "video", pads_per_step
    yield "audio", num_sounds - num_written


def _interleave_in_chunks(
    times: list[float], pads_per_step: int, num_sounds: int, tokens_per_chunk: int
) -> Iterator[tuple[MediaKind, int]]:
    """Yield them in Qwen2.5-Omni's order: frames, then sound, in chunks as long as so many tokens of sound."""
    frames = _chunk_sizes([(time, pads_per_step) for time in times], tokens_per_chunk)
    sounds = _chunk_sizes([(float(i), 1) for i in range(num_sounds)], tokens_per_chunk)
    for num_frame_tokens, num_sound_tokens in zip_longest(frames, sounds, fillvalue=0):
        yield "video", num_frame_tokens
        yield "audio", num_sound_tokens


def _chunk_sizes(tokens: list[tuple[float, int]], chunk: int) -> list[int]:
    """Return the number of tokens in each chunk, given (time, number of tokens), ascending.

    A token at or after a chunk's end begins the next one: only one, as in transformers, even if later than its end.
    """
    sizes = [0]
    for time, count in tokens:
        while count and time >= len(sizes) * chunk:
            sizes.append(1)
            count -= 1
        sizes[-1] += count
    return sizes


QWEN2_5_OMNI = Family(
    title="Qwen2.5-Omni (its thinker)",
    model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
    encoding=QwenOmni,
    kinds=("image", "video", "audio"),
    towers=Towers(
        vision=("model.visual", "model.audio_tower"),
        aligner=("model.visual.merger",),
        unused=("model.audio_tower.audio_bos_eos_token",),
    ),
    positions="sound_seconds",
    mel_frames=4,
    sound_chunk=(4, 1),
    boxes=BoxForm("lists", "pixels"),
)

_OMNI_ALIGNER = ("visual.merger", "visual.merger_list", "audio_tower.proj1", "audio_tower.proj2")
QWEN3_OMNI = replace(
    QWEN2_5_OMNI,
    title="Qwen3-Omni (its thinker)",
    model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
    is_qwen3=True,
    towers=Towers(
        vision=("model.visual", "model.audio_tower"), aligner=tuple(f"model.{name}" for name in _OMNI_ALIGNER)
    ),
    sound_chunk=(100, 13),
    boxes=BoxForm("lists", "thousandths"),
)

FAMILIES = (QWEN2_5_OMNI, QWEN3_OMNI)
