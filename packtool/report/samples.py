"""Pages to leaf through a cache with: its samples and their media, what was dropped and why, the packs of a plan.

They are files by names, ``index.html``, ``data/samples-3.js``, ``media/151-0.jpg``, and each is made when it is asked
for: all of them into a folder that needs no server (``write_pages``), or one at a time (``packtool.report.serve``).

The packs of a plan on pages of samples: which are shown, in the order of their training, and in which steps.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from packtool import storage
from packtool.cache.plan_file import SavedPlan, read_plan_of
from packtool.cache.reader import CacheReader
from packtool.config.commands import InspectConfig
from packtool.config.settings import load_json
from packtool.constants import DROPPED_NAME, IGNORE_INDEX
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedVideo
from packtool.errors import ConfigError, MediaError
from packtool.media.measure import load_image
from packtool.media.opening import MediaProblem, open_medium
from packtool.media.suffix import is_media, suffix_of
from packtool.media.video import load_video
from packtool.planning.prefix_trees import find_branches
from packtool.progress import Progress
from packtool.report.drawing import render
from packtool.report.inspect import Decoder, all_media
from packtool.rows.media_policy import MediaPolicy, policy_for_cache
from packtool.rows.sample import MediaRef
from packtool.visible import visible

Int64Array = npt.NDArray[np.int64]
_STEP, _RANK, _MICRO_BATCH = range(3)


class ShownPacks:
    """The packs that pages show: step by step and rank by rank where the plan says who trains them, else by number.

    Args:
        plan: that they are of.
        most: samples, about; packs are evenly chosen, by whole steps where one has no more than so many.

    Attributes:
        numbers: int64, of the packs in the plan, in the order of the pages.
    """

    def __init__(self, plan: SavedPlan, most: int) -> None:
        self._plan = plan
        self._sizes = np.diff(plan.offsets)
        self._places = None if plan.places is None else _places_of_packs(plan.places, plan.offsets)
        self.numbers = self._chosen(most)

    @property
    def samples(self) -> Int64Array:
        """Numbers of the samples of all packs that are shown, int64 (N,), ascending."""
        held = [self._plan.samples[self._held(pack)] for pack in self.numbers.tolist()]
        return np.unique(np.concatenate(held))

    def pack(self, number: int) -> dict[str, Any]:
        """What the page draws of a pack."""
        here = self._held(number)
        samples = self._plan.samples[here].tolist()
        shared = None if self._plan.shared is None else self._plan.shared[here]
        # A prefix of several samples is nobody's own.
        parts = [
            (samples[branch.first] if branch.num_samples == 1 else None, branch.num_tokens, branch.num_samples)
            for branch in find_branches(self._plan.lengths[here], shared)
        ]
        return {"number": number, "samples": len(samples), "parts": parts}

    def places(self) -> list[Int64Array]:
        """Step, rank and micro-batch, three arrays (K,), of packs that are shown; -1 for several; [] if unknown."""
        return [] if self._places is None else list(self._places[self.numbers].T)

    def steps(self) -> dict[str, Int64Array]:
        """Figures (S,) of the steps that are shown, in their order: of all their packs, also of those not shown."""
        if self._plan.places is None or self._places is None or not len(self.numbers):
            return {}
        step, rank, micro_batch = self._plan.places.T.astype(np.int64)
        num_steps, num_ranks = int(step.max()) + 1, int(rank.max()) + 1
        cells = np.bincount(step * num_ranks + rank, self._plan.lengths, num_steps * num_ranks)
        tokens = cells.astype(np.int64).reshape(num_steps, num_ranks)
        num_micro_batches = np.zeros(num_steps, np.int64)
        np.maximum.at(num_micro_batches, step, micro_batch + 1)
        shown = np.unique(self._places[self.numbers, _STEP])
        figures = {
            "packs": np.bincount(self._places[:, _STEP], minlength=num_steps),
            "microBatches": num_micro_batches,
            "tokens": tokens.sum(axis=1),
            "least": tokens.min(axis=1),
            "most": tokens.max(axis=1),
        }
        return {"number": shown, **{name: column[shown] for name, column in figures.items()}}

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks that have packs; 0 if that is not known."""
        return 0 if self._plan.places is None else int(self._plan.places[:, _RANK].max(initial=-1)) + 1

    def place_of(self, sample: int) -> list[int] | None:
        """Pack, and if they are known step, rank and micro-batch, of a sample; None if it is in no pack."""
        order = self._by_sample
        at = int(np.searchsorted(self._plan.samples, sample, sorter=order))
        if at == len(order) or self._plan.samples[order[at]] != sample:
            return None
        row = int(order[at])
        pack = int(np.searchsorted(self._plan.offsets, row, side="right")) - 1
        return [pack] if self._plan.places is None else [pack, *self._plan.places[row].tolist()]

    @cached_property
    def _by_sample(self) -> Int64Array:
        return np.argsort(self._plan.samples, kind="stable")

    def _held(self, pack: int) -> slice:
        return slice(int(self._plan.offsets[pack]), int(self._plan.offsets[pack + 1]))

    def _chosen(self, most: int) -> Int64Array:
        num_packs = len(self._sizes)
        share = min(1.0, most / max(len(self._plan.samples), 1))
        if self._places is None:
            return evenly(num_packs, max(int(num_packs * share), 1))
        steps = self._places[:, _STEP]
        num_steps = int(steps.max(initial=-1)) + 1
        shown = evenly(num_steps, max(int(num_steps * share), 1))
        packs = np.flatnonzero(np.isin(steps, shown))
        if len(shown) == 1 and (held := int(self._sizes[packs].sum())) > most:
            packs = packs[evenly(len(packs), max(int(len(packs) * most / held), 1))]
        step, rank, micro_batch = self._places[packs].T
        return packs[np.lexsort((packs, micro_batch, rank, step))]


def evenly(count: int, most: int) -> Int64Array:
    """At most so many of the numbers below ``count``, (N,), as far apart from each other as can be."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))


def _places_of_packs(places: npt.NDArray[np.int32], offsets: Int64Array) -> Int64Array:
    """Step, rank and micro-batch of each pack, (K, 3); -1 where its samples have several, as Skrull's may."""
    if len(offsets) == 1:
        return np.empty((0, 3), np.int64)
    first = places[offsets[:-1]]
    is_one = (first == np.maximum.reduceat(places, offsets[:-1])) & (first == np.minimum.reduceat(places, offsets[:-1]))
    return np.where(is_one, first, -1).astype(np.int64)


INDEX = "index.html"
_IN_A_BLOCK = 50
_MOST_DROPPED = 10_000
"""Dropped rows that are listed; all are counted."""
_THUMBNAIL = 512
_MOST_PLAYED = 8_000_000
"""Bytes of the largest file that a player gets."""
_MEDIUM = re.compile(r"media/(\d+)-(\d+)(\.\w+)")
_BLOCK = re.compile(r"data/(samples|packs)-(\d+)\.js")
_OURS = re.compile(rf"{INDEX}|samples\.js|data/(cache|dropped)\.js|{_BLOCK.pattern}|{_MEDIUM.pattern}")
"""Files of pages."""

Medium = EncodedImage | EncodedVideo | EncodedAudio


class Pages:
    """The pages of one split of a cache.

    Args:
        config: which cache, split, plan and model.
        is_whole: whether all samples are shown; else about ``max_samples`` at most, evenly chosen from the split, or
            all those of packs that are evenly chosen from the plan, by whole steps where it knows them.

    Raises:
        ConfigError: if the model cannot be read.
        MismatchError: if there is no such cache or split, or the plan belongs to another cache.
    """

    def __init__(self, config: InspectConfig, is_whole: bool) -> None:
        self._config = config
        self._reader = CacheReader.open([config.directory], config.split)
        self._decoder = Decoder.of_cache(self._reader, config.model)
        self._policy = policy_for_cache(config)
        self._plan = None if config.plan is None else read_plan_of(self._reader, config.plan)
        most = len(self._reader) if is_whole else config.max_samples
        self._packs = None if self._plan is None else ShownPacks(self._plan, most)
        self.numbers = evenly(len(self._reader), most)
        if self._packs is not None and not is_whole:
            self.numbers = self._packs.samples
        self._dropped = _dropped(storage.join(self._reader.directories[0], DROPPED_NAME))

    @property
    def num_cached(self) -> int:
        """All samples of the split."""
        return len(self._reader)

    def names(self) -> Iterator[str]:
        """All files but those of the media; the last makes the others pages."""
        yield "samples.js"
        yield from ("data/cache.js", "data/dropped.js")
        if self._packs is not None:
            yield from (f"data/packs-{block}.js" for block in range(_num_blocks(self._packs.numbers)))
        yield from (f"data/samples-{block}.js" for block in range(_num_blocks(self.numbers)))
        yield INDEX

    def media_names(self, number: int) -> list[str]:
        """Files of the media of a sample: a small picture of what can be seen, and what can be played."""
        media = all_media(self._reader.sample(number))
        return [name for i, medium in enumerate(media) for name in _places(number, i, medium).values()]

    def content(self, name: str) -> bytes | None:
        """A file's bytes; None if there is no such file, or its medium cannot be had, or is too large to be played.

        Raises:
            StorageError: if the cache, or the store of a medium, cannot be reached.
        """
        if name == INDEX:
            return render("samples.html", title=self._title).encode()
        if name == "samples.js":
            return render("samples.js").encode()
        if name == "data/cache.js":
            return _script("cache", self._overview())
        if name == "data/dropped.js":
            return _script("dropped", self._dropped)
        if found := _BLOCK.fullmatch(name):
            kind, block = found[1], int(found[2])
            here = slice(block * _IN_A_BLOCK, (block + 1) * _IN_A_BLOCK)
            if kind == "samples":
                return _script(f"samples-{block}", [self._sample(int(number)) for number in self.numbers[here]])
            packs = self._packs
            if packs is not None:
                return _script(f"packs-{block}", [packs.pack(int(pack)) for pack in packs.numbers[here]])
        if found := _MEDIUM.fullmatch(name):
            return self._medium(int(found[1]), int(found[2]), found[3])
        return None

    @property
    def _title(self) -> str:
        return f"{storage.masked(self._config.directory)}, {self._config.split}"

    def _overview(self) -> dict[str, Any]:
        """What the filters need of all samples, and figures of the cache."""
        index, chosen = self._reader.index, self.numbers
        kinds = sum(
            (counts[chosen] > 0) * bit
            for counts, bit in ((index.num_images, 1), (index.num_videos, 2), (index.num_audios, 4))
        )
        return {
            "total": len(self._reader),
            "numbers": _packed(chosen),
            "lengths": _packed(index.length[chosen]),
            "channel": _packed(index.channel[chosen]),
            "kinds": _packed(np.asarray(kinds)),
            "channels": list(index.channels),
            "inABlock": _IN_A_BLOCK,
            "dropped": dict(self._reader.manifests[0].dropped),
            "packs": None if self._packs is None else self._overview_of_packs(self._packs),
        }

    def _overview_of_packs(self, packs: ShownPacks) -> dict[str, Any]:
        assert self._plan is not None
        return {
            "shown": len(packs.numbers),
            "all": len(self._plan.offsets) - 1,
            "capacity": self._plan.info.capacity,
            "sharesPrefixes": self._plan.shared is not None,
            "ranks": packs.num_ranks,
            "places": [_packed(column) for column in packs.places()],
            "steps": {name: _packed(column) for name, column in packs.steps().items()},
        }

    def _sample(self, number: int) -> dict[str, Any]:
        sample = self._reader.sample(number)
        media = all_media(sample)
        places: dict[int, dict[str, Any]] = {
            id(medium): dict(_places(number, i, medium)) for i, medium in enumerate(media)
        }
        decoded = list(self._decoder.parts(sample))
        for region in self._decoder.regions(sample, decoded):
            image = sample.images[region.image]
            shown = {"told": region.told(image.width, image.height), "corners": region.corners}
            place = places[id(image)] | {"ratio": image.width / image.height}
            place.setdefault("regions", []).append(shown | {"isCertain": region.is_certain})
            places[id(image)] = place
        parts = [
            {"look": part.look, "text": part.text}
            | ({} if part.weight == 1 else {"weight": f"{part.weight:g}"})
            | ({} if part.medium is None else places[id(part.medium)])
            for part in decoded
        ]
        return {
            "number": number,
            "source": storage.masked(sample.source),
            "row": sample.row,
            "part": "" if sample.part is None else f", {sample.part}",
            "channel": sample.channel,
            "tokens": sample.length,
            "trained": int((sample.labels != IGNORE_INDEX).sum()),
            "truncated": sample.num_truncated,
            "place": None if self._packs is None else self._packs.place_of(number),
            "parts": parts,
        }

    def _medium(self, number: int, i: int, suffix: str) -> bytes | None:
        if not 0 <= number < len(self._reader):
            return None
        media = all_media(self._reader.sample(number))
        if i >= len(media) or f"media/{number}-{i}{suffix}" not in _places(number, i, media[i]).values():
            return None
        try:
            return _thumbnail(media[i], self._policy) if suffix == ".jpg" else _playable(media[i], self._policy)
        except (MediaError, MediaProblem):
            return None


def write_pages(pages: Pages, directory: str, progress: Progress) -> int:
    """Write all pages and media that can be had; a folder without its ``index.html`` was not finished.

    Args:
        directory: new, empty or with such pages, which are replaced.

    Returns:
        how many media files could not be read or are too large.

    Raises:
        ConfigError: if other things lie in the directory.
        StorageError: if it cannot be written.
    """
    directory = storage.normalize(directory)
    there = sorted(storage.walk(directory)) if storage.is_directory(directory) else []
    # What a command that was killed has left of a file was its own, too.
    names = {path: storage.final_name(path).removeprefix(directory).lstrip("/") for path in there}
    if strange := [path for path, name in names.items() if not _OURS.fullmatch(name)]:
        raise ConfigError(
            f"--html {directory} is not empty: {strange[0]} would lie among the pages",
            "Name a folder that does not exist yet.",
        )
    for path in sorted(there, key=lambda path: storage.name(path) != INDEX):
        storage.remove(path)
    for name in ("data", "media"):
        storage.make_directory(storage.join(directory, name))
    try:
        return _write_all(pages, directory, progress)
    except BaseException:
        storage.discard_unfinished(directory)
        raise


def _write_all(pages: Pages, directory: str, progress: Progress) -> int:
    num_missing = 0
    progress.start("writing samples", len(pages.numbers))
    for number in pages.numbers.tolist():
        for name in pages.media_names(number):
            content = pages.content(name)
            num_missing += content is None
            if content is not None:
                storage.publish(storage.join(directory, name), content)
        progress.advance(1)
    for name in pages.names():
        content = pages.content(name)
        assert content is not None, name
        storage.publish(storage.join(directory, name), content)
    progress.finish()
    return num_missing


def _num_blocks(numbers: npt.NDArray[np.int64]) -> int:
    return -(-len(numbers) // _IN_A_BLOCK)


def _script(name: str, value: Any) -> bytes:
    """A value as a script that hands it to the page: pages opened from a disk may load scripts, but no JSON."""
    return f"packtool.give({json.dumps(name)}, {json.dumps(_shown(value))});\n".encode()


def _shown(value: Any) -> Any:
    """The value with every text in it made safe to show."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {_shown(key): _shown(each) for key, each in value.items()}
    return [_shown(each) for each in value] if isinstance(value, (list, tuple)) else value


def _packed(numbers: npt.NDArray[Any]) -> str:
    """Whole numbers as base64 of little-endian int32: a tenth of what a browser needs to read lists of digits."""
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def _dropped(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with storage.open_read(path) as file:
        for line in file:
            row = load_json(line)
            if "part" in row:
                continue  # its row is kept
            found.append({key: row[key] for key in ("source", "row", "reason", "detail")})
            if len(found) == _MOST_DROPPED:
                break
    return found


def _places(number: int, i: int, medium: Medium) -> dict[str, str]:
    """Names of a medium's files: ``seen`` for its small picture, and ``played`` for the file itself."""
    found = {} if isinstance(medium, EncodedAudio) else {"seen": f"media/{number}-{i}.jpg"}
    if not isinstance(medium, EncodedImage) and (medium.path is not None or medium.data is not None):
        found["played"] = f"media/{number}-{i}{suffix_of(medium.path, medium.data)}"
    return found


def _thumbnail(medium: Medium, policy: MediaPolicy) -> bytes:
    if isinstance(medium, EncodedImage):
        picture = load_image(medium.path, medium.data, policy)
    else:
        assert isinstance(medium, EncodedVideo)
        picture = Image.fromarray(load_video(medium.path, medium.data, medium.frames, medium.indices[:1], policy)[0])
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    target = io.BytesIO()
    picture.save(target, "JPEG", quality=80)
    return target.getvalue()


def _playable(medium: Medium, policy: MediaPolicy) -> bytes | None:
    assert not isinstance(medium, EncodedImage)
    with open_medium(MediaRef(medium.path, medium.data, policy=policy), storage.ROWS_BLOCK) as file:
        data = file.read(_MOST_PLAYED + 1)
    return data if len(data) <= _MOST_PLAYED and is_media(data) else None
