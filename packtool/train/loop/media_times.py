"""Loading times of media on this machine, and the data workers that training needs.

``packtool plan --media`` measures random samples of each kind of media, and a run the first samples of its plan. Times
are the larger of elapsed and CPU time, because the threads of decoders find no free cores beside several workers.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from packtool import storage
from packtool.batch.media import load_media, load_pixels, load_processed, load_sounds
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader, SplitIndex
from packtool.config.plan import PlanConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import sounds_in_order
from packtool.errors import ConfigError, MediaError, StorageError
from packtool.progress import Progress
from packtool.simulate.hardware import read_hardware
from packtool.train.prepare.cached import CachedSource
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.run import Run
from packtool.train.prepare.workers import cores_of_a_rank, workers_of

MAX_SAMPLES = 32
"""Maximum number of measured samples of each kind of media."""
_MAX_SECONDS = 20.0
_MAX_MEASURING_SECONDS = 2.0  # before a run
# Columns of the caches' index with a sample's media of each kind.
_KINDS = {"pictures": "num_images", "videos": "num_videos", "sounds": "audio_tokens"}
_Files = list[tuple[str | None, bytes | None]]


@dataclass(frozen=True)
class LoadingTimes:
    """Loading times of a step's media.

    Args:
        kinds: for each kind of media in the caches: its name ``kind``, number of ``measured`` media, ``seconds`` and
            ``megabytes`` of one, and how many a rank loads ``per_step``.
        step_seconds: estimated computation time of a step; ``assumed`` describes the source of this estimate.
    """

    kinds: Sequence[Mapping[str, Any]]
    step_seconds: float
    assumed: str
    cores: int

    @property
    def seconds(self) -> float:
        """Seconds that one worker needs to load the media of one rank's step."""
        return float(sum(kind["seconds"] * kind["per_step"] for kind in self.kinds))

    @property
    def workers(self) -> int:
        """Number of data workers with which a rank loads media as fast as it computes steps."""
        return math.ceil(self.seconds / self.step_seconds)

    @property
    def megabytes_per_second(self) -> float:
        """Megabytes that one rank reads per second if its steps never wait for media."""
        return float(sum(kind["megabytes"] * kind["per_step"] for kind in self.kinds)) / self.step_seconds

    def waited(self, workers: int) -> float:
        """Return the share of time that steps wait for media; with 0 workers, media are loaded between steps."""
        if not workers:
            return self.seconds / (self.seconds + self.step_seconds)
        return max(1 - self.step_seconds * workers / self.seconds, 0.0) if self.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """Return all figures by their names in JSON."""
        return {
            "kinds": [dict(kind) for kind in self.kinds],
            "seconds_per_step": self.seconds,
            "step_seconds": self.step_seconds,
            "workers": self.workers,
            "megabytes_per_second": self.megabytes_per_second,
            "waited": {str(workers): self.waited(workers) for workers in self._shown_workers()},
        }

    def table(self) -> Sequence[tuple[str, ...]]:
        """Return a heading and a row for each kind of media."""
        rows = [("", "measured", "ms each", "MB each", "per step and rank")]
        for kind in self.kinds:
            figures = f"{kind['seconds'] * 1000:.1f}", f"{kind['megabytes']:.3g}", f"{kind['per_step']:.3g}"
            rows.append((kind["kind"], f"{kind['measured']:,}", *figures))
        return rows

    def sentences(self) -> list[str]:
        """Describe the workers that training needs, and how long it would wait with fewer."""
        waits = [f"{self.waited(workers):.0%} with {workers}" for workers in self._shown_workers()]
        sentences = [
            f"A rank's step takes about {self.step_seconds:.3g} s ({self.assumed}), and loading its media "
            f"{self.seconds:.3g} s of one data worker: --dataloader-num-workers {self.workers} is fast enough, and "
            f"reads {self.megabytes_per_second:.3g} MB/s per rank.",
            f"Share of time that steps would wait, by number of data workers: {', '.join(waits)}.",
        ]
        if self.workers >= self.cores:
            sentences.append(f"This machine has only {self.cores} cores for all of its ranks and data workers.")
        return sentences

    def _shown_workers(self) -> Sequence[int]:
        return sorted({0, 1, self.workers // 2, self.workers})


def measure_workers(run: Run, spec: InputSpec) -> int:
    """Choose a run's number of data workers by loading media of up to 32 samples, for at most about two seconds.

    Without media, for streamed rows, and with ``--dataloader-num-workers``, nothing is loaded.
    """
    source = run.source
    if run.config.dataloader_num_workers is not None or not isinstance(source, CachedSource):
        return workers_of(run)
    spec = dataclasses.replace(spec, media_cache=None)  # its statistics are those of training
    planned = source.timeline.span_at(source.start).plan.packs.samples
    has_media = source.reader.index.media_tokens[planned] > 0
    distinct_samples = list(dict.fromkeys(planned[has_media].tolist()))  # in the order of the plan
    with single_thread():
        seconds, num_tokens = _measure_samples(source.reader, distinct_samples[: MAX_SAMPLES + 1], spec)
    return workers_of(run, seconds / num_tokens) if num_tokens else workers_of(run)


def _measure_samples(reader: CacheReader, positions: Sequence[int], spec: InputSpec) -> tuple[float, int]:
    """Load the media of samples for about two seconds; return the seconds and media tokens of all but the first."""
    seconds, num_tokens = 0.0, 0
    for number, position in enumerate(positions):
        sample = reader.sample(position)
        try:
            sample_seconds = _loading_seconds(load_media, sample, spec)
        except (MediaError, StorageError):  # training reports it
            continue
        if number > 0:  # the time of the first includes loading processors
            seconds += sample_seconds
            num_tokens += int(reader.index.media_tokens[position])
        if seconds > _MAX_MEASURING_SECONDS:
            break
    return seconds, num_tokens


def _loading_seconds(load: Callable[..., Any], sample: EncodedSample, spec: InputSpec) -> float:
    """Load the media of a sample; return the seconds that passed, or those of the CPU if they are more."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    load([sample], spec)
    return max(time.perf_counter() - begin, time.process_time() - cpu_begin)


@contextmanager
def single_thread() -> Iterator[None]:
    """Let torch use one thread, as in a data worker."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def measure_media(config: PlanConfig, preview: Preview, progress: Progress) -> LoadingTimes:
    """Measure how long some of a plan's media take to load; ConfigError without media or steps."""
    reader = preview.inputs.reader
    assert reader is not None, "called for caches only"
    samples_by_kind = _samples_by_kind(reader.index)
    if not preview.plan.summary.num_steps or not preview.num_epochs:
        raise ConfigError("--media: the plan has no steps, so there is nothing to measure", "Leave out --media.")
    identity = reader.manifests[0].identity
    spec = InputSpec.load(config.model or str(identity.spec["model"]), identity.media_limits)
    kinds = []
    with single_thread():
        for kind, samples_of_kind in samples_by_kind.items():
            samples = map(reader.sample, _select_samples(samples_of_kind, config.seed))
            measured = _measure_loading(kind, samples, spec, progress)
            kinds.append({"kind": kind, **_kind_figures(measured, preview, samples_of_kind)})
    step_seconds, assumed = _estimate_step(config, preview)
    return LoadingTimes(kinds, step_seconds, assumed, cores_of_a_rank())


def _samples_by_kind(index: SplitIndex) -> dict[str, npt.NDArray[np.int64]]:
    """Return the positions of the samples with media of each kind; raise a ConfigError if there are none."""
    columns = {kind: getattr(index, name) for kind, name in _KINDS.items()}
    samples_by_kind = {kind: np.flatnonzero(column > 0) for kind, column in columns.items() if column.any()}
    if not samples_by_kind:
        raise ConfigError("--media: the caches contain no media, so there is nothing to measure", "Leave out --media.")
    return samples_by_kind


def _select_samples(samples: npt.NDArray[np.integer[Any]], seed: int) -> list[int]:
    """Select up to 33 samples at random; ``_measure_loading`` does not count the first one."""
    selected: list[int] = np.random.default_rng(seed).permutation(samples)[: MAX_SAMPLES + 1].tolist()
    if len(selected) <= MAX_SAMPLES:  # so that every sample is counted, load the first one twice
        selected = [selected[0], *selected]
    return selected


def _kind_figures(
    measured: _Measured, preview: Preview, samples_of_kind: npt.NDArray[np.integer[Any]]
) -> dict[str, Any]:
    """Return the figures of a kind in ``LoadingTimes.kinds``; ``samples_of_kind`` are all samples with such media."""
    # Of an epoch, in which a mixture may use a sample several times or never.
    num_planned = np.isin(preview.plan.packs.samples, samples_of_kind).sum()
    num_loaded = num_planned * _loaded_share(preview) * measured.num_media / measured.num_samples
    num_ranks = preview.options.world_size * preview.first_inputs.sequence_parallel_size
    num_steps = preview.plan.summary.num_steps
    return {
        "measured": measured.num_media,
        "seconds": measured.seconds / measured.num_media,
        "megabytes": measured.num_bytes / measured.num_media / 1e6,
        "per_step": num_loaded / num_steps / num_ranks,
    }


def _loaded_share(preview: Preview) -> float:
    """Return the share of an epoch's media that are loaded: below 1 if samples share prefixes, which load once."""
    shared, reader = preview.inputs.shared, preview.inputs.reader
    if shared is None or reader is None:
        return 1.0
    num_tokens = reader.index.media_tokens[np.unique(shared.trees.samples)].sum()
    return float(shared.media_tokens.sum() / max(num_tokens, 1))


def _estimate_step(config: PlanConfig, preview: Preview) -> tuple[float, str]:
    """Estimate the computation time of a step, in seconds; also describe the assumptions."""
    tflops, hardware_name = config.tflops, "--tflops"
    if tflops is None:
        hardware = read_hardware(config.hardware)
        tflops, hardware_name = hardware.peak_tflops, hardware.name
    epoch_seconds = preview.figures(tflops, config.mfu)["hours"] * 3600 / preview.num_epochs
    assumed = f"{preview.cost_source} on {hardware_name}, --mfu {config.mfu:g}"
    return epoch_seconds / preview.plan.summary.num_steps, assumed


class _Measured(NamedTuple):
    """Figures of the samples whose media of one kind were loaded; ``num_bytes`` of the media's files."""

    num_media: int
    seconds: float
    num_bytes: int
    num_samples: int


def _measure_loading(kind: str, samples: Iterable[EncodedSample], spec: InputSpec, progress: Progress) -> _Measured:
    """Load the media of one kind ("pictures", "videos" or "sounds") of each sample, and measure the time.

    The first sample is loaded but not counted, because its time includes imports. Stop early after ``_MAX_SECONDS``.
    """
    num_media = 0
    num_bytes = 0
    num_samples = 0
    total_seconds = 0.0
    progress.start(f"loading {kind}", MAX_SAMPLES)
    for number, sample in enumerate(samples):
        sample_of_kind, files_of_media, load = _with_only(kind, sample, spec)
        sample_seconds = _loading_seconds(load, sample_of_kind, spec)
        if number == 0:
            continue
        num_samples += 1
        num_media += len(files_of_media)
        num_bytes += sum(_num_bytes(files) for files in files_of_media)
        total_seconds += sample_seconds
        progress.advance(1)
        if total_seconds > _MAX_SECONDS:
            break
    progress.finish()
    return _Measured(num_media, total_seconds, num_bytes, num_samples)


def _num_bytes(files: _Files) -> int:
    """Bytes of the files of a medium; the content of embedded ones is at hand."""
    return sum(len(data) if data is not None else storage.stat(os.fspath(path or "")).size for path, data in files)


def _with_only(
    kind: str, sample: EncodedSample, spec: InputSpec
) -> tuple[EncodedSample, list[_Files], Callable[..., Any]]:
    """Return a sample with only one kind of media, the files of each medium, and the function that loads them."""
    load_vision = load_processed if spec.family.processor_inputs else load_pixels
    if kind == "pictures":
        return dataclasses.replace(sample, videos=()), [[(one.path, one.data)] for one in sample.images], load_vision
    if kind == "videos":
        files: list[_Files] = [[*one.frames] or [(one.path, one.data)] for one in sample.videos]
        return dataclasses.replace(sample, images=()), files, load_vision
    return sample, [[(path, data)] for _, path, data in sounds_in_order(sample, spec.media_tokens)], load_sounds
