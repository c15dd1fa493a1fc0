"""``packtool plan --media``: how long this machine takes to load media, and what training will need for them.

Some samples with pictures, with videos and with sounds are drawn by the plan's seed, and their media are read, decoded,
resized and cut into patches, as a process that loads for a rank does it. What is measured is the longer of the time and
of what all cores were busy together: decoders have threads, and beside several processes these find no free cores.

The disk's cache makes files that were read lately faster than they will be; bytes are those of whole files, of which
seeking leaves out a part.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from packtool import storage
from packtool.batch.pixels import load_pixels
from packtool.batch.processed import load_processed
from packtool.batch.sounds import load_sounds
from packtool.batch.spec import InputSpec
from packtool.config.plan import PlanConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import sounds_in_order
from packtool.errors import ConfigError
from packtool.progress import Progress
from packtool.simulate.run import read_hardware
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.workers import cores_of_a_rank

NUM_SAMPLES = 32
"""Samples that are measured of each kind of media, at most."""
_MOST_SECONDS = 20.0
_KINDS = {"pictures": "num_images", "videos": "num_videos", "sounds": "audio_tokens"}
_Files = list[tuple[str | None, bytes | None]]


@dataclass(frozen=True)
class KindTimes:
    """One kind of media.

    Args:
        kind: pictures, videos or sounds.
        measured: how many were loaded.
        seconds: to load one.
        megabytes: of the file of one.
        per_step: how many a rank loads for a step.
    """

    kind: str
    measured: int
    seconds: float
    megabytes: float
    per_step: float


@dataclass(frozen=True)
class LoadingTimes:
    """What a step's media take.

    Args:
        kinds: those that the caches have.
        step_seconds: that a step computes.
        assumed: where that is from, for users.
        cores: of this machine.
    """

    kinds: tuple[KindTimes, ...]
    step_seconds: float
    assumed: str
    cores: int

    @property
    def seconds(self) -> float:
        """To load the media of one rank's step, in one process."""
        return sum(kind.seconds * kind.per_step for kind in self.kinds)

    @property
    def workers(self) -> int:
        """Processes a rank that load as fast as its steps go."""
        return math.ceil(self.seconds / self.step_seconds)

    @property
    def megabytes_per_second(self) -> float:
        """What one rank reads while its steps are not kept waiting."""
        return sum(kind.megabytes * kind.per_step for kind in self.kinds) / self.step_seconds

    def waited(self, workers: int) -> float:
        """Share of the time that steps wait for their media; without workers they are loaded between steps."""
        if not workers:
            return self.seconds / (self.seconds + self.step_seconds)
        return max(1 - self.step_seconds * workers / self.seconds, 0.0) if self.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """All figures by name, as JSON has them."""
        return {
            "kinds": [dataclasses.asdict(kind) for kind in self.kinds],
            "seconds_per_step": self.seconds,
            "step_seconds": self.step_seconds,
            "workers": self.workers,
            "megabytes_per_second": self.megabytes_per_second,
            "waited": {str(workers): self.waited(workers) for workers in self._told()},
        }

    def table(self) -> Sequence[tuple[str, ...]]:
        """A heading and a row for each kind."""
        rows = [("", "measured", "ms each", "MB each", "a rank's step")]
        for kind in self.kinds:
            figures = f"{kind.seconds * 1000:.1f}", f"{kind.megabytes:.3g}", f"{kind.per_step:.3g}"
            rows.append((kind.kind, f"{kind.measured:,}", *figures))
        return rows

    def sentences(self) -> list[str]:
        """What training needs, and what it would wait otherwise."""
        waits = [f"{self.waited(workers):.0%} with {workers}" for workers in self._told()]
        found = [
            f"A rank's step takes about {self.step_seconds:.3g} s ({self.assumed}), and its media {self.seconds:.3g} s "
            f"of one process: --dataloader-num-workers {self.workers} keeps up, and reads "
            f"{self.megabytes_per_second:.3g} MB/s a rank.",
            f"Share of the time that steps would wait: {', '.join(waits)}.",
        ]
        if self.workers >= self.cores:
            found.append(f"This machine has {self.cores} cores for all of its ranks and what they load with.")
        return found

    def _told(self) -> Sequence[int]:
        return sorted({0, 1, self.workers // 2, self.workers})


def measure_media(config: PlanConfig, found: Preview, progress: Progress) -> LoadingTimes:
    """Load some of a plan's media.

    Raises:
        ConfigError: if the caches have none, or their model's processors cannot be had.
        MediaError: naming a medium that cannot be read.
    """
    reader, shared = found.inputs.reader, found.inputs.shared
    assert reader is not None, "asked of caches alone"
    identity = reader.manifests[0].identity
    model = config.model or str(identity.spec["model"])
    index, summary = reader.index, found.plan.summary
    pools = {kind: np.flatnonzero(getattr(index, name) > 0) for kind, name in _KINDS.items()}
    if not any(map(len, pools.values())):
        raise ConfigError("--media: the caches hold no media, so there is nothing to load")
    if not summary.num_steps or not found.num_epochs:
        raise ConfigError("--media: the plan has no step that media are loaded for")
    spec = InputSpec.load(model, identity.media_limits)
    planned, trained = found.plan.packs.samples, 1.0
    if shared is not None:  # of media in prefixes that are computed once, about
        trained = shared.media_tokens.sum() / index.media_tokens.sum()
    ranks = found.options.world_size * found.first_inputs.sequence_parallel_size
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a process that loads
    try:
        kinds = []
        for kind, pool in pools.items():
            if len(pool):
                samples = (reader.sample(place) for place in _drawn(pool, config.seed))
                measured, seconds, size, num_samples = _measured(kind, samples, spec, progress)
                num_planned = np.isin(planned, pool).sum()  # a mixture takes some samples several times, and others not
                per_step = num_planned * trained * measured / num_samples / summary.num_steps / ranks
                kinds.append(KindTimes(kind, measured, seconds / measured, size / measured / 1e6, per_step))
    finally:
        torch.set_num_threads(threads)
    step_seconds, assumed = _step_seconds(config, found)
    return LoadingTimes(tuple(kinds), step_seconds, assumed, cores_of_a_rank())


def _drawn(pool: Any, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).permutation(pool)[: NUM_SAMPLES + 1].tolist()
    # The first is loaded twice and counted once: before it, processors are not there yet.
    return drawn if len(drawn) > NUM_SAMPLES else [drawn[0], *drawn]


def _measured(
    kind: str, samples: Iterable[EncodedSample], spec: InputSpec, progress: Progress
) -> tuple[int, float, int, int]:
    """(media, seconds, bytes, samples) but for the first sample."""
    media = size = num_samples = 0
    seconds, is_first = 0.0, True
    progress.start(f"loading {kind}", NUM_SAMPLES)
    for sample in samples:
        alone, files, load = _only(kind, sample, spec)
        begin = time.perf_counter(), time.process_time()
        load([alone], spec)
        took = max(time.perf_counter() - begin[0], time.process_time() - begin[1])
        if is_first:
            is_first = False
            continue
        media, seconds, size, num_samples = media + len(files), seconds + took, size + _size(files), num_samples + 1
        progress.advance(1)
        if seconds > _MOST_SECONDS:
            break
    progress.finish()
    return media, seconds, size, num_samples


def _only(kind: str, sample: EncodedSample, spec: InputSpec) -> tuple[EncodedSample, list[_Files], Callable[..., Any]]:
    """A sample with one kind of media, the files of each, and what loads them."""
    look = load_processed if spec.family.processor_inputs else load_pixels
    if kind == "pictures":
        return dataclasses.replace(sample, videos=()), [[(one.path, one.data)] for one in sample.images], look
    if kind == "videos":
        files: list[_Files] = [[*one.frames] or [(one.path, one.data)] for one in sample.videos]
        return dataclasses.replace(sample, images=()), files, look
    return sample, [[(path, data)] for _, path, data in sounds_in_order(sample, spec.media_tokens)], load_sounds


def _size(media: list[_Files]) -> int:
    files = [file for one in media for file in one]
    return sum(len(data) if data is not None else storage.stat(os.fspath(path or "")).size for path, data in files)


def _step_seconds(config: PlanConfig, found: Preview) -> tuple[float, str]:
    """Seconds of a step on paper, and where they are from."""
    if config.tflops is not None:
        tflops, of = config.tflops, "--tflops"
    else:
        hardware = read_hardware(config.hardware)
        tflops, of = hardware.peak_tflops, hardware.name
    hours = found.figures(tflops, config.mfu)["hours"]
    seconds = hours * 3600 / found.num_epochs / found.plan.summary.num_steps
    return seconds, f"{found.cost_source} on {of}, --mfu {config.mfu:g}"
