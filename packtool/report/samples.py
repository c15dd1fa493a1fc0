"""Pages that show a cache: its samples and media, dropped rows, and the packs of a plan.

Pages are files such as ``index.html``, ``data/samples-3.js`` and ``media/151-0.jpg``. ``Pages`` makes each on request:
``write_pages`` writes all of them to a folder that needs no server, and ``serving`` serves them over HTTP.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import io
import itertools
import json
import math
import mimetypes
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
from PIL import Image

from packtool import storage
from packtool.cache.plan_file import SavedPlan, read_plan_of
from packtool.cache.reader import CacheReader
from packtool.cache.shard import index_columns
from packtool.config.commands import InspectConfig
from packtool.constants import DROPPED_NAME, IGNORE_INDEX
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.errors import ConfigError, MediaError, PacktoolError
from packtool.media.files import MediaProblem, open_medium
from packtool.media.measure import load_image
from packtool.media.suffix import is_media, suffix_of
from packtool.media.video import load_video
from packtool.planning.prefix_branches import find_branches
from packtool.progress import Progress
from packtool.report.drawing import plural, render
from packtool.report.inspect import Decoder, Medium, dropped_rows, model_of_cache
from packtool.report.losses import GROUPS, RunLosses, encode_rows
from packtool.rows.media_policy import MediaPolicy, policy_for_cache
from packtool.rows.sample import MediaRef
from packtool.terminal import escape_text

Int64Array = npt.NDArray[np.int64]
INDEX = "index.html"
_STEP, _RANK = 0, 1  # columns of a plan's locations; the third one is the micro-batch
_BLOCK_SIZE = 50  # samples or packs of a data file
_MAX_DROPPED = 10_000  # rows that are listed; the number shown counts all
_THUMBNAIL_SIZE = 512
_MAX_PLAYABLE_BYTES = 8_000_000
_MEDIA_FILE = re.compile(r"media/(\d+)-(\d+)(\.\w+)")  # sample, index of the medium in the sample, suffix
_BLOCK_FILE = re.compile(r"data/(samples|packs)-(\d+)\.js")
_PAGE_FILE = re.compile(rf"{INDEX}|samples\.js|data/(cache|dropped)\.js|{_BLOCK_FILE.pattern}|{_MEDIA_FILE.pattern}")


class ShownPacks:
    """The packs of a plan that pages show: ordered by step, rank and micro-batch if the plan has these.

    They have about ``max_samples`` and are evenly spaced over the plan. If it has steps, all packs of evenly spaced
    steps are shown, unless a single step exceeds this number. ``numbers``, (K,), are the packs' numbers in the plan.
    """

    def __init__(self, plan: SavedPlan, max_samples: int) -> None:
        self._plan = plan
        self._pack_locations = _locations_of_packs(plan)
        self._by_sample = np.argsort(plan.samples, kind="stable")
        self.numbers = self._choose_packs(max_samples)

    def _choose_packs(self, max_samples: int) -> Int64Array:
        pack_sizes = np.diff(self._plan.offsets)
        fraction = min(1.0, max_samples / max(len(self._plan.samples), 1))
        if self._pack_locations is None:
            return evenly_spaced(len(pack_sizes), len(pack_sizes) * fraction)
        steps = self._pack_locations[:, _STEP]
        num_steps = int(steps.max(initial=-1)) + 1
        shown_steps = evenly_spaced(num_steps, num_steps * fraction)
        packs = np.flatnonzero(np.isin(steps, shown_steps))
        num_samples = int(pack_sizes[packs].sum())
        if len(shown_steps) == 1 and num_samples > max_samples:
            packs = packs[evenly_spaced(len(packs), len(packs) * max_samples / num_samples)]
        step, rank, micro_batch = self._pack_locations[packs].T
        return packs[np.lexsort((packs, micro_batch, rank, step))]

    @property
    def samples(self) -> Int64Array:
        """Numbers of the samples in the packs shown, int64 (N,), ascending."""
        samples = [self._plan.samples[self._slice(pack)] for pack in self.numbers.tolist()]
        return np.unique(np.concatenate(samples))

    def pack(self, number: int) -> dict[str, Any]:
        """Return the samples and shared prefixes of a pack, for the page's script."""
        members = self._slice(number)
        samples = self._plan.samples[members].tolist()
        shared = None if self._plan.shared_tokens is None else self._plan.shared_tokens[members]
        branches = []
        for branch in find_branches(self._plan.lengths[members], shared):
            sample = samples[branch.first_sample] if branch.num_samples == 1 else None  # None for a shared prefix
            branches.append((sample, branch.num_tokens, branch.num_samples))
        return {"number": number, "samples": len(samples), "parts": branches}

    def overview(self) -> dict[str, Any]:
        """Return figures of the plan, and step, rank and micro-batch of the packs shown; arrays as base64."""
        ranks = 0 if self._plan.locations is None else int(self._plan.locations[:, _RANK].max(initial=-1)) + 1
        columns = [] if self._pack_locations is None else list(self._pack_locations[self.numbers].T)
        return {
            "shown": len(self.numbers),
            "all": len(self._plan.offsets) - 1,
            "capacity": self._plan.capacity,
            "sharesPrefixes": self._plan.shared_tokens is not None,
            "ranks": ranks,
            "places": [_base64(column) for column in columns],
            "steps": {name: _base64(column) for name, column in self._steps().items()},
        }

    def _steps(self) -> dict[str, Int64Array]:
        """Return figures of the S steps shown, (S,) each, which count all packs of a step, also those not shown."""
        has_packs = len(self.numbers) > 0
        if self._plan.locations is None or self._pack_locations is None or not has_packs:
            return {}
        step_of_pack = self._pack_locations[:, _STEP]
        figures = _figures_of_steps(self._plan.locations, self._plan.lengths, step_of_pack)
        shown_steps = np.unique(step_of_pack[self.numbers])
        return {name: values[shown_steps] for name, values in figures.items()}

    def location_of(self, sample: int) -> list[int] | None:
        """Return pack and, if known, step, rank and micro-batch of a sample; None if it is in no pack."""
        index = int(np.searchsorted(self._plan.samples, sample, sorter=self._by_sample))
        if index == len(self._by_sample) or self._plan.samples[self._by_sample[index]] != sample:
            return None
        position = int(self._by_sample[index])  # of the sample's first occurrence in the plan
        pack = int(np.searchsorted(self._plan.offsets, position, side="right")) - 1
        return [pack] if self._plan.locations is None else [pack, *self._plan.locations[position].tolist()]

    def _slice(self, pack: int) -> slice:
        return slice(int(self._plan.offsets[pack]), int(self._plan.offsets[pack + 1]))


def _figures_of_steps(
    locations: npt.NDArray[Any], lengths: npt.NDArray[Any], step_of_pack: Int64Array
) -> dict[str, Int64Array]:
    """Return figures of the S steps of a plan of N samples in K packs, (S,) each, by their names on the page.

    ``locations``, (N, 3), are step, rank and micro-batch of each sample; ``lengths``, (N,), their tokens.
    ``step_of_pack`` is (K,). ``least`` and ``most`` are tokens of the ranks with fewest and most in the step.
    """
    step, rank, micro_batch = locations.T.astype(np.int64)  # (N,) each
    num_steps = int(step.max()) + 1
    num_ranks = int(rank.max()) + 1
    last_micro_batch = np.zeros(num_steps, np.int64)
    np.maximum.at(last_micro_batch, step, micro_batch)
    rank_tokens = np.zeros((num_steps, num_ranks), np.int64)
    np.add.at(rank_tokens, (step, rank), lengths)
    return {
        "number": np.arange(num_steps),
        "packs": np.bincount(step_of_pack, minlength=num_steps),
        "microBatches": last_micro_batch + 1,
        "tokens": rank_tokens.sum(axis=1),
        "least": rank_tokens.min(axis=1),
        "most": rank_tokens.max(axis=1),
    }


def _locations_of_packs(plan: SavedPlan) -> Int64Array | None:
    """Return step, rank and micro-batch of each pack, (K, 3), or -1 if its samples differ; None without locations."""
    if plan.locations is None:
        return None
    starts = plan.offsets[:-1]
    if not len(starts):
        return np.empty((0, 3), np.int64)
    lowest, highest = np.minimum.reduceat(plan.locations, starts), np.maximum.reduceat(plan.locations, starts)
    return np.where(lowest == highest, lowest, -1).astype(np.int64)


def evenly_spaced(count: int, max_numbers: float) -> Int64Array:
    """Return evenly spaced numbers from 0 to ``count - 1``, int64 (N,), ascending; at most ``max_numbers``, but one."""
    num_numbers = min(count, max(int(max_numbers), 1))
    return np.unique(np.linspace(0, count - 1, num_numbers).round().astype(np.int64))


def _first_dropped_rows(directory: str) -> list[dict[str, Any]]:
    rows = itertools.islice(dropped_rows(storage.join(directory, DROPPED_NAME)), _MAX_DROPPED)
    return [{name: row[name] for name in ("source", "row", "reason", "detail")} for row in rows]


class Pages:
    """The pages of one split of a cache, or of a run with its losses.

    With ``shows_all`` of all samples of caches, otherwise of about ``config.max_samples``: evenly spaced ones, or those
    of evenly spaced packs, or those with unusual losses. ``numbers`` (N,) are their positions in the split or the run,
    and ``notes`` are messages on the ``num_left_out`` chosen samples of a stream that cannot be shown.
    """

    def __init__(self, config: InspectConfig, shows_all: bool) -> None:
        self._config, self._policy = config, policy_for_cache(config)
        self._losses = RunLosses(config.directory) if config.shows_losses else None
        self.notes, self.num_left_out = list[str](), 0
        reader = self._losses.reader if self._losses else CacheReader.open([config.directory], config.split)
        self._sample_at: Callable[[int], EncodedSample]
        if reader is None:
            self._open_stream()
        else:
            self._open_caches(reader, shows_all=shows_all)

    def _open_caches(self, reader: CacheReader, *, shows_all: bool) -> None:
        """Choose samples of caches, and read their index, their dropped rows and the plan."""
        config = self._config
        self.num_cached, self._sample_at = len(reader), reader.sample
        identity = reader.manifests[0].identity
        self._decoder = Decoder(model_of_cache(reader, config.model), identity.spec, identity.media_limits)
        max_samples = self.num_cached if shows_all else config.max_samples
        plan = None if config.plan is None else read_plan_of(reader, config.plan)
        self._packs = None if plan is None else ShownPacks(plan, max_samples)
        self.numbers = self._choose_samples(max_samples, shows_all=shows_all)
        self._columns = {name: each[self.numbers] for name, each in vars(reader.index).items() if name != "channels"}
        self._channels, self._num_dropped = reader.index.channels, dict(reader.manifests[0].dropped)
        self._dropped = _first_dropped_rows(reader.directories[0])

    def _open_stream(self) -> None:
        """Choose samples of a run on streamed rows, and encode them again."""
        assert self._losses is not None, "only a run has a stream"
        if self._config.plan is not None:
            raise ConfigError(f"--plan {self._config.plan}: a run on streamed rows has no plan", "Leave --plan out.")
        self._packs, self._dropped, self._num_dropped = None, [], {}
        self.num_cached = len(self._losses.last)
        chosen = self._choose_samples(self._config.max_samples, shows_all=False)
        self._decoder, samples, problems = encode_rows(self._losses, chosen, self._config.model)
        self.num_left_out = len(chosen) - len(samples)
        if self.num_left_out:
            left_out = f"{plural(self.num_left_out, 'sample')} left out"
            self.notes = [*problems[:5], f"{left_out}: their rows or media have changed or are no longer there"]
        self._sample_at, self.numbers = samples.__getitem__, np.array([*samples], np.int64)
        channel_codes: dict[str, int] = {}
        self._columns = index_columns([*samples.values()], 0, 0, channel_codes)
        self._channels = tuple(channel_codes)

    def _choose_samples(self, max_samples: int, *, shows_all: bool) -> Int64Array:
        if self._packs is not None and not shows_all:
            return self._packs.samples
        if self._losses is not None and not shows_all:
            max_of_group = max(max_samples // len(GROUPS), 1)
            return np.unique(np.concatenate([group[:max_of_group] for group in self._losses.groups.values()]))
        return evenly_spaced(self.num_cached, max_samples)

    def names(self) -> Iterator[str]:
        """Yield the names of all files except media; the index is last, so that unfinished folders have none."""
        yield from ("samples.js", "data/cache.js", "data/dropped.js")
        num_packs = 0 if self._packs is None else len(self._packs.numbers)
        for kind, count in (("packs", num_packs), ("samples", len(self.numbers))):
            for block in range(math.ceil(count / _BLOCK_SIZE)):
                yield f"data/{kind}-{block}.js"
        yield INDEX

    def media_names(self, number: int) -> list[str]:
        """Return names of a sample's media files: thumbnails of images and videos, and playable videos and audio."""
        media = self._sample_at(number).media
        return [name for i, medium in enumerate(media) for name in _media_files(number, i, medium).values()]

    def content(self, name: str) -> bytes | None:
        """Return a file's bytes; None if there is no such file, or its medium is unreadable or too large to play."""
        if name == INDEX:
            title = f"{storage.masked(self._config.directory)}, {self._config.split}"
            return render("samples.html", title=title).encode()
        if name == "samples.js":
            return render("samples.js").encode()
        if name == "data/cache.js":
            return _script("cache", self._overview())
        if name == "data/dropped.js":
            return _script("dropped", self._dropped)
        if match := _BLOCK_FILE.fullmatch(name):
            return self._block(match[1], int(match[2]))
        if match := _MEDIA_FILE.fullmatch(name):
            return self._media_file(name, int(match[1]), int(match[2]))
        return None

    def _block(self, kind: str, block: int) -> bytes | None:
        """Return a data file of ``_BLOCK_SIZE`` samples or packs."""
        in_block = slice(block * _BLOCK_SIZE, (block + 1) * _BLOCK_SIZE)
        if kind == "samples":
            return _script(f"samples-{block}", list(map(self._sample, self.numbers[in_block].tolist())))
        if self._packs is None:
            return None
        return _script(f"packs-{block}", list(map(self._packs.pack, self._packs.numbers[in_block].tolist())))

    def _media_file(self, name: str, number: int, index: int) -> bytes | None:
        """Return the file ``name`` of a medium: a thumbnail, or the medium itself to play it."""
        media = self._sample_at(number).media if number in self.numbers else ()
        if index >= len(media):
            return None
        names = _media_files(number, index, media[index])
        with contextlib.suppress(MediaError, MediaProblem):
            if name == names.get("seen"):
                return _thumbnail(media[index], self._policy)
            if name == names.get("played"):
                return _playable(media[index], self._policy)
        return None

    def _overview(self) -> dict[str, Any]:
        """Return figures of the cache, and the values by which the page filters samples; arrays as base64."""
        columns = self._columns
        has_images, has_videos, has_audios = (columns[f"num_{kind}s"] > 0 for kind in ("image", "video", "audio"))
        return {
            "total": self.num_cached,
            "numbers": _base64(self.numbers),
            "lengths": _base64(columns["length"]),
            "channel": _base64(columns["channel"]),
            "kinds": _base64(1 * has_images + 2 * has_videos + 4 * has_audios),  # bits of ``samples.js``
            "channels": list(self._channels),
            "inABlock": _BLOCK_SIZE,
            "dropped": dict(self._num_dropped),
            "packs": None if self._packs is None else self._packs.overview(),
            "losses": None if self._losses is None else self._loss_figures(self._losses),
        }

    def _loss_figures(self, losses: RunLosses) -> dict[str, Any]:
        """Return losses of the samples shown, in thousandths and -1 for none, and bits of their groups; as base64."""
        by_epoch = [values[self.numbers] * 1000 for values in losses.losses.values()]
        thousandths = [np.nan_to_num(values, nan=-1, posinf=1e9).round() for values in by_epoch]
        bits = [np.isin(self.numbers, group) << bit for bit, group in enumerate(losses.groups.values())]
        return {
            "epochs": [*map(_base64, thousandths)],
            "groups": _base64(np.bitwise_or.reduce(bits)),
            "titles": list(GROUPS.values()),
        }

    def _sample(self, number: int) -> dict[str, Any]:
        """Return a sample for the page's script, ``samples.js``, which determines the keys."""
        sample = self._sample_at(number)
        return {
            "number": number,
            "source": storage.masked(sample.source),
            "row": sample.row,
            "part": "" if sample.part is None else f", {sample.part}",
            "channel": sample.channel,
            "tokens": sample.length,
            "trained": int((sample.labels != IGNORE_INDEX).sum()),
            "truncated": sample.num_truncated,
            "place": None if self._packs is None else self._packs.location_of(number),
            "parts": self._parts(number, sample),
        }

    def _parts(self, number: int, sample: EncodedSample) -> list[dict[str, Any]]:
        """Return the parts of sample ``number``: text in one style, or a medium with its files and regions."""
        # By object identity, because equal media may occur several times.
        media_figures = {id(each): dict[str, Any](_media_files(number, i, each)) for i, each in enumerate(sample.media)}
        parts = self._decoder.parts(sample)
        for region in self._decoder.regions(sample, parts):
            image = sample.images[region.image]
            description = region.description(image.width, image.height)
            region_figures = {"told": description, "corners": region.corners, "isCertain": region.is_certain}
            media_figures[id(image)]["ratio"] = image.width / image.height
            media_figures[id(image)].setdefault("regions", []).append(region_figures)
        figures = []
        for part in parts:
            weight = {} if part.weight == 1 else {"weight": f"{part.weight:g}"}
            medium_figures = {} if part.medium is None else media_figures[id(part.medium)]
            figures.append({"look": part.style, "text": part.text, **weight, **medium_figures})
        return figures


def write_pages(pages: Pages, directory: str, progress: Progress) -> int:
    """Write all pages and media files to a directory; return how many media files cannot be read or are too large.

    The directory may be new, be empty or contain earlier pages, which are replaced; ConfigError if it has other files.
    """
    directory = storage.normalize(directory)
    _remove_pages(directory)
    for folder in ("data", "media"):
        storage.make_directory(storage.join(directory, folder))

    num_missing = 0
    progress.start("writing samples", len(pages.numbers))
    try:
        for number in pages.numbers.tolist():
            for name in pages.media_names(number):
                content = pages.content(name)  # None if it cannot be shown
                if content is None:
                    num_missing += 1
                else:
                    storage.publish(storage.join(directory, name), content)
            progress.advance(1)
        for name in pages.names():
            content = pages.content(name)
            assert content is not None, name
            storage.publish(storage.join(directory, name), content)
    except BaseException:  # also Ctrl-C
        storage.discard_unfinished(directory)
        raise
    progress.finish()
    return num_missing


def _remove_pages(directory: str) -> None:
    """Remove earlier pages from a directory; raise a ConfigError and remove nothing if it has other files."""
    existing = sorted(storage.walk(directory)) if storage.is_directory(directory) else []
    for path in existing:
        # Files that a killed command did not finish have temporary names; compare their final ones.
        final_name = storage.final_name(path).removeprefix(directory).lstrip("/")
        if not _PAGE_FILE.fullmatch(final_name):
            problem = f"--html {directory} contains other files than pages, such as {path}"
            raise ConfigError(problem, "Choose a directory that does not exist yet.")
    # The index is removed first, so that a folder whose pages are only partly removed has no index.
    for path in sorted(existing, key=lambda path: storage.name(path) != INDEX):
        storage.remove(path)


def _script(name: str, value: Any) -> bytes:
    """Return a script that passes a value to the page: pages opened from a disk may load scripts, but not JSON."""
    return f"packtool.give({json.dumps(name)}, {json.dumps(_escape(value))});\n".encode()


def _escape(value: Any) -> Any:
    """Return a JSON value with control characters escaped in all of its strings."""
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, dict):
        return {_escape(key): _escape(item) for key, item in value.items()}
    return [_escape(item) for item in value] if isinstance(value, (list, tuple)) else value


def _base64(numbers: npt.NDArray[Any]) -> str:
    """Return integers as base64 of little-endian int32, which a browser reads ten times as fast as lists of digits."""
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()


def _media_files(number: int, i: int, medium: Medium) -> dict[str, str]:
    """Return names of the files of medium ``i`` of a sample: ``seen`` is the thumbnail, ``played`` the file itself."""
    files = {} if isinstance(medium, EncodedAudio) else {"seen": f"media/{number}-{i}.jpg"}
    if not isinstance(medium, EncodedImage) and (medium.path is not None or medium.data is not None):
        files["played"] = f"media/{number}-{i}{suffix_of(medium.path, medium.data)}"
    return files


def _thumbnail(medium: Medium, policy: MediaPolicy) -> bytes:
    """Return an image, or the first frame of a video, as a small JPEG."""
    if isinstance(medium, EncodedImage):
        picture = load_image(medium.path, medium.data, policy)
    else:
        assert isinstance(medium, EncodedVideo)
        picture = Image.fromarray(load_video(medium.path, medium.data, medium.frames, medium.indices[:1], policy)[0])
    picture.thumbnail((_THUMBNAIL_SIZE, _THUMBNAIL_SIZE))
    target = io.BytesIO()
    picture.save(target, "JPEG", quality=80)
    return target.getvalue()


def _playable(medium: Medium, policy: MediaPolicy) -> bytes | None:
    """Return the file of a video or a sound; None if it is too large, or no media file."""
    assert not isinstance(medium, EncodedImage)
    with open_medium(MediaRef(medium.path, medium.data, policy=policy), storage.ROWS_BLOCK) as file:
        data = file.read(_MAX_PLAYABLE_BYTES + 1)
    return data if len(data) <= _MAX_PLAYABLE_BYTES and is_media(data) else None


_HOST = "127.0.0.1"
_MIME_TYPES = {"": "text/html", ".html": "text/html", ".js": "text/javascript", ".jpg": "image/jpeg"}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self'; "
    "media-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _PageServer(ThreadingHTTPServer):
    """A server of pages on this machine, which answers only requests that begin with a secret token."""

    def __init__(self, content: Callable[[str], bytes | None], port: int) -> None:
        self.content = content
        self.token = secrets.token_urlsafe(16)
        self.lock = threading.Lock()  # held during calls of ``content``
        super().__init__((_HOST, port), _PageHandler)


class _PageHandler(BaseHTTPRequestHandler):
    server: _PageServer

    def do_GET(self) -> None:
        status, body, mime_type = self._response()
        if mime_type.startswith("text/"):
            mime_type += "; charset=utf-8"
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": mime_type, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _response(self) -> tuple[HTTPStatus, bytes, str]:
        """Return status, body and MIME type of the response."""
        token, _, name = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        # Against DNS rebinding: a script of another site reaches this server only under that site's host name.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        has_token = hmac.compare_digest(token.encode(), self.server.token.encode())
        if host not in (_HOST, "localhost") or not has_token:
            return HTTPStatus.FORBIDDEN, b"The address has no valid token.\n", "text/plain"
        try:
            with self.server.lock:
                body = self.server.content(name or INDEX)
        except PacktoolError as error:
            return HTTPStatus.BAD_GATEWAY, f"{error}\n".encode(), "text/plain"
        if body is None:
            return HTTPStatus.NOT_FOUND, b"No such file.\n", "text/plain"
        media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return HTTPStatus.OK, body, _MIME_TYPES.get(os.path.splitext(name)[1], media_type)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because addresses contain the token."""


@contextlib.contextmanager
def serving(content: Callable[[str], bytes | None], port: int = 0) -> Iterator[str]:
    """Serve pages on this machine in background threads; yield their address, which contains a secret token.

    ``content`` returns the bytes of a file by its name, or None; it is called by one thread at a time. Port 0 chooses a
    free one.
    """
    try:
        server = _PageServer(content, port)
    except OSError as error:
        problem = f"--port {port} cannot be used: {error.strerror or error}"
        raise ConfigError(problem, "Use --port 0 for a free one.") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="serve", daemon=True)
    thread.start()
    try:
        yield f"http://{_HOST}:{server.server_port}/{server.token}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
