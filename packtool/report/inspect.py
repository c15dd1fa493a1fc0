"""What ``packtool inspect`` shows: a cache's figures, and single samples as a person can read them.

``packtool inspect --verify``: every file of a cache held against the manifest.

Boxes, points and polygons of a sample, read back from its text, to be drawn on its pictures.

What is shown is what the model is told: the tokens are decoded, and the numbers in them are taken as the model's family
means them. So a box that was scaled wrongly, by whoever made the rows, is drawn where it does not belong.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from packtool import storage
from packtool.cache.local import check_all
from packtool.cache.manifest import Identity, Manifest
from packtool.cache.reader import CacheReader
from packtool.cache.restart import num_finished
from packtool.cache.task import TASKS_DIR
from packtool.config.data import EncodeSpec
from packtool.config.settings import load_json
from packtool.constants import DROPPED_NAME, IGNORE_INDEX, MANIFEST_NAME
from packtool.encode.boxes import box_form_of, written_size
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import ImageLimits, pad_ids_of
from packtool.encode.families.boxes import INTERNVL_TOKENS, QWEN_TOKENS, BoxForm, BoxTokens
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, MismatchError
from packtool.progress import Progress
from packtool.train.prepare.check import repair_command
from packtool.visible import visible

PICTURE = "\ufffc"
"""Stands in a sample's text for each of its pictures."""
_NUMBER = r"-?\d{1,6}(?:\.\d+)?"
_LIST = rf"\[\s*{_NUMBER}(?:\s*,\s*{_NUMBER})+\s*\]"


def _between(tokens: BoxTokens, group: str) -> str:
    """What stands between the tokens of a box; its name may come before it."""
    (name, name_end), (box, box_end) = ([*map(re.escape, pair)] for pair in (tokens.name, tokens.box))
    named = rf"{name}(?P<{group}_name>(?:(?!{name_end}).){{0,1000}}){name_end}\s*"
    return rf"(?:{named})?{box}(?P<{group}>{tokens.box_pattern}){box_end}"


_FOUND = re.compile(
    rf"{_between(QWEN_TOKENS, 'pairs')}|{_between(INTERNVL_TOKENS, 'lists')}"
    # JSON says what its numbers are, and one list in it may hold several.
    rf'|"\w+_2d"\s*:\s*(?P<json>{_LIST}|\[\s*{_LIST}(?:\s*,\s*{_LIST})*\s*\])'
    # A list of numbers in other text is a box from four numbers on; a point stands behind a quote, a word or "=".
    rf"|(?P<list>{_LIST})",
    re.DOTALL,
)
_STRING = r'"(?:label|text_content)"\s*:\s*(?P<label>"(?:[^"\\]|\\.){0,1000}")'
_LABEL, _LABEL_BEFORE = re.compile(rf"\s*,\s*{_STRING}"), re.compile(rf"{_STRING}\s*,\s*$")
_LONGEST_LABEL = 1100
_NUMBERS = re.compile(_NUMBER)
_TOKENS = re.compile("|".join(map(re.escape, (*QWEN_TOKENS.name, *INTERNVL_TOKENS.name))))


@dataclass(frozen=True)
class ShownRegion:
    """A box, a point or a polygon as it is drawn.

    Args:
        name: what the text calls it, or "".
        corners: (x, y) of each corner, as shares of the picture's sides.
        image: number of the picture among the sample's.
        is_certain: whether it can be on no other picture.
    """

    name: str
    corners: tuple[tuple[float, float], ...]
    image: int
    is_certain: bool

    @property
    def is_inside(self) -> bool:
        """Whether all of it is in the picture."""
        return all(0 <= share <= 1 for corner in self.corners for share in corner)

    def told(self, width: int, height: int) -> str:
        """What it is and where, in pixels of a picture of this size."""
        kind = {1: "point", 2: "box"}.get(len(self.corners), "polygon")
        places = " ".join(f"{x * width:.0f},{y * height:.0f}" for x, y in self.corners)
        outside = "" if self.is_inside else ", outside of it"
        sure = "" if self.is_certain else ", if it is on this one"
        return f"{self.name + ', ' if self.name else ''}{kind} {places} of picture {self.image}{outside}{sure}"


class _Read(NamedTuple):
    """Numbers in a text, and what they may be called."""

    start: int
    name: str
    numbers: tuple[float, ...]
    is_said: bool


def regions_of(
    text: str, images: Sequence[EncodedImage], form: BoxForm | None, limits: ImageLimits | None, is_whole: bool
) -> list[ShownRegion]:
    """What a sample's text says of places in its pictures.

    Where the text cannot tell which of several pictures is meant, a place is on each that comes before it.

    Args:
        text: of the whole sample, with ``PICTURE`` for each picture.
        form: of the model's family.
        limits: of the model on pictures.
        is_whole: whether truncation took nothing, a picture perhaps.
    """
    if form is None or not images:
        return []
    found: list[ShownRegion] = []
    for read in _read(text):
        before = text.count(PICTURE, 0, read.start) or len(images)
        for number, image in enumerate(images[:before]):
            size = written_size(form, image, limits)
            corners = tuple(
                (x / size[0], y / size[1]) for x, y in zip(read.numbers[::2], read.numbers[1::2], strict=True)
            )
            region = ShownRegion(read.name, corners, number, is_whole and len(images) == 1)
            if read.is_said or (region.is_inside and _is_ordered(read.numbers)):
                found.append(region)
    return found


def _read(text: str) -> Iterator[_Read]:
    for match in _FOUND.finditer(text):
        several = match["json"] or match["lists"]
        shown = several or match["pairs"] or match["list"] or ""
        is_said, name = match["list"] is None, match["pairs_name"] or match["lists_name"] or ""
        if not name and is_said:
            before = text[max(match.start() - _LONGEST_LABEL, 0) : match.start()]
            label = _LABEL.match(text, match.end()) or _LABEL_BEFORE.search(before)
            name = _plain(label["label"]) if label else ""
        for each in re.findall(r"\[[^\[\]]*\]", shown) if several else [shown]:
            numbers = tuple(map(float, _NUMBERS.findall(each)))
            if len(numbers) % 2 == 0 and (is_said or len(numbers) > 2 or _is_attached(text, match.start())):
                yield _Read(match.start(), _TOKENS.sub("", name).strip(), numbers, is_said)


def _plain(label: str) -> str:
    try:
        return str(json.loads(label, strict=False))
    except ValueError:
        return label[1:-1]


def _is_attached(text: str, start: int) -> bool:
    """Whether a list stands right behind a quote, a word or "=", as coordinates may, and other pairs rarely do."""
    before = text[max(start - 1, 0) : start]
    return before.isalnum() or before in tuple("'\"=")


def _is_ordered(numbers: Sequence[float]) -> bool:
    return len(numbers) != 4 or (numbers[0] <= numbers[2] and numbers[1] <= numbers[3])


_EXAMPLES = 2
_SAMPLE_RATE = 16_000

Look = Literal["plain", "trained", "media", "truncated"]


def cache_figures(directory: str) -> dict[str, Any]:
    """Everything that the manifest tells, and some examples of what was dropped.

    Raises:
        MismatchError: if it is no finished cache; says how much of one there is.
    """
    directory = storage.normalize(directory)
    if not storage.exists(storage.join(directory, MANIFEST_NAME)):
        tasks = storage.join(directory, TASKS_DIR)
        if storage.list_names(tasks):
            count = num_finished(directory)
            raise MismatchError(
                f"{directory} is an unfinished cache: {count} shards are finished so far",
                "Run the same packtool export again to go on.",
            )
    manifest = Manifest.read(directory)
    identity = manifest.identity
    defaults = {field.name: field.default for field in dataclasses.fields(EncodeSpec)}
    return {
        "directory": directory,
        "packtool_version": manifest.packtool_version,
        "fingerprint": manifest.fingerprint,
        "model": identity.spec["model"],
        "model_type": identity.model_type,
        "settings": {
            name: value
            for name, value in identity.spec.items()
            if name != "model" and value is not None and value != defaults.get(name)
        },
        "media_limits": dataclasses.asdict(identity.media_limits),
        "sources": [dataclasses.asdict(source) for source in manifest.sources],
        "rows": manifest.rows,
        "marks_added": manifest.marks_added,
        "channels": list(manifest.channels),
        "dropped": dict(manifest.dropped),
        "parts_left_out": dict(manifest.parts_left_out),
        "dropped_examples": _examples(storage.join(directory, DROPPED_NAME)),
        "splits": {
            name: {**dataclasses.asdict(split), "shards": len(split.shards)} for name, split in manifest.splits.items()
        },
        "max_length": manifest.max_length,
    }


def _examples(path: str) -> dict[str, list[dict[str, Any]]]:
    """The first rows dropped for each reason; the file is read line by line."""
    found: dict[str, list[dict[str, Any]]] = {}
    with storage.open_read(path) as file:
        for line in file:
            row = load_json(line)
            if "part" in row:
                continue  # its row is kept
            examples = found.setdefault(row["reason"], [])
            if len(examples) < _EXAMPLES:
                examples.append(row)
    return found


def figure_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures as lines of a table."""
    lines = [
        ("model", f"{figures['model_type']}, {figures['model']}"),
        ("fingerprint", f"{figures['fingerprint']}, packtool {figures['packtool_version']}"),
        *((f"  {name}", str(value)) for name, value in figures["settings"].items()),
    ]
    for source in figures["sources"]:
        lines.append((source["path"], f"{source['rows']:,} rows {source['settings']}".strip()))
    lines.append(("rows in", f"{figures['rows']:,}"))
    for name, split in figures["splits"].items():
        share = split["target_tokens"] / max(split["tokens"], 1)
        lines += [
            (name, f"{split['rows']:,} samples{_of_rows(split)} in {split['shards']} shards"),
            ("  tokens", f"{split['tokens']:,}"),
            ("  target tokens", f"{split['target_tokens']:,} ({share:.1%})"),
            ("  media tokens", f"{split['media_tokens']:,}"),
            ("  truncated", f"{split['truncated']:,} samples, {split['truncated_tokens']:,} tokens"),
        ]
    if figures["parts_left_out"]:
        told = ", ".join(f"{count:,} {reason}" for reason, count in figures["parts_left_out"].items())
        lines.append(("turns and responses left out", told))
    lines.append(("dropped", f"{sum(figures['dropped'].values()):,}"))
    for reason, count in figures["dropped"].items():
        lines.append((f"  {reason}", f"{count:,}"))
        for row in figures["dropped_examples"].get(reason, ()):
            lines.append((f"    {row['source']}, row {row['row']}", row["detail"]))
    return lines


def _of_rows(split: Mapping[str, Any]) -> str:
    return f" of {split['rows'] - split['pieces_added']:,} rows" if split["pieces_added"] else ""


@dataclass(frozen=True)
class SampleView:
    """One sample for a person.

    Args:
        facts: (what, value).
        parts: (how it looks, text, weight of a trained stretch).
    """

    facts: list[tuple[str, str]]
    parts: list[tuple[Look, str, float]]

    @property
    def text(self) -> str:
        """The sample without colours: what is trained between « and », behind its weight if that is not 1."""
        return visible("".join(f"«{marked}»" if look == "trained" else marked for look, marked in self.marked()))

    def marked(self) -> Iterator[tuple[Look, str]]:
        """How each part looks and its text, that of a trained one behind its weight if that is not 1."""
        for look, text, weight in self.parts:
            yield look, f"{weight:g}:{text}" if look == "trained" and weight != 1 else text


def sample_view(directory: str, split: str, row: int, model: str | None = None) -> SampleView:
    """A sample decoded, with its media named.

    Args:
        row: position in the split.
        model: directory of the tokenizer; the one of the export by default.

    Raises:
        ConfigError: if there is no such row, or no such model.
    """
    reader = CacheReader.open([directory], split)
    if not 0 <= row < len(reader):
        raise ConfigError(f"--row {row}: the {split} split has rows 0 to {len(reader) - 1}")
    sample = reader.sample(row)
    decoder = Decoder.of_cache(reader, model)
    facts = [
        ("source", f"{sample.source}, row {sample.row}"),
        ("channel", sample.channel or "none"),
        ("tokens", f"{sample.length:,}, of them {int((sample.labels != IGNORE_INDEX).sum()):,} trained"),
    ]
    if sample.part is not None:
        facts.insert(1, ("part of its row", str(sample.part)))
    if sample.num_truncated:
        facts.append(("truncated", f"{sample.num_truncated:,} tokens"))
    parts = list(decoder.parts(sample))
    for number, region in enumerate(decoder.regions(sample, parts), 1):
        image = sample.images[region.image]
        facts.append((f"place {number}", region.told(image.width, image.height)))
    return SampleView(facts, [(part.look, part.text, part.weight) for part in parts])


@dataclass(frozen=True)
class Part:
    """A stretch of a sample that looks alike.

    Args:
        text: what its tokens say; of a medium, what it is in brackets, and so what was cut off in this place.
        weight: of the loss on it, where it is trained.
        medium: that its placeholder tokens stand for.
    """

    look: Look
    text: str
    weight: float = 1.0
    medium: EncodedImage | EncodedVideo | EncodedAudio | None = None


class Decoder:
    """Turns the tokens of samples into what a person can read.

    Args:
        files: of the model that they were made for.
        identity: of the cache that they are in.
    """

    def __init__(self, files: ModelFiles, identity: Identity) -> None:
        self._strategy = str(identity.spec.get("truncation_strategy"))
        self._trims = identity.spec.get("media_overflow") == "trim"
        self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        self._pads = _pad_ids(files.config, self._tokenizer)
        self._limits = identity.media_limits.image
        self._form = box_form_of(files.config, *(identity.spec.get(name) for name in ("bbox_format", "norm_bbox")))

    @classmethod
    def of_cache(cls, reader: CacheReader, model: str | None = None) -> Decoder:
        """The one for a cache.

        Args:
            model: directory of the tokenizer; the one of the export by default.

        Raises:
            ConfigError: if the model cannot be read.
        """
        return cls(model_of_cache(reader, model), reader.manifests[0].identity)

    def parts(self, sample: EncodedSample) -> Iterator[Part]:
        """The sample from its first token to its last, and on the side where it was cut how much is missing.

        What truncation removes is not in a cache: only how many tokens, and the side that the export was told to cut.
        """
        cut = [Part("truncated", self._cut(sample))] if sample.num_truncated else []
        parts = _parts(sample, self._tokenizer, self._pads)
        yield from (*parts, *cut) if self._strategy == "right" else (*cut, *parts)

    def _cut(self, sample: EncodedSample) -> str:
        oldest = "its oldest media"
        if self._strategy in ("left", "right"):
            side = "its beginning" if self._strategy == "left" else "its end"
            oldest = f"{side}, or of {oldest}" if self._trims else f"{side}"
        return f"[{sample.num_truncated:,} tokens of {oldest} cut off]"

    def regions(self, sample: EncodedSample, parts: Sequence[Part]) -> list[ShownRegion]:
        """What the sample says of places in its pictures.

        Args:
            parts: of the sample.
        """
        text = "".join(PICTURE if isinstance(part.medium, EncodedImage) else part.text for part in parts)
        return regions_of(text, sample.images, self._form, self._limits, is_whole=not sample.num_truncated)


def model_of_cache(reader: CacheReader, model: str | None = None) -> ModelFiles:
    """The files of the model that a cache was exported for, or of ``model``.

    Raises:
        ConfigError: if they cannot be read.
    """
    exported_for = str(reader.manifests[0].identity.spec["model"])
    try:
        return ModelFiles.load(model or exported_for)
    except ConfigError as error:
        if model is not None:
            raise
        raise ConfigError(
            f"{reader.directories[0]} was exported for {exported_for}, which cannot be read here: {error.message}",
            "Say where that model is now: --model DIR.",
        ) from error


def _pad_ids(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[int, str]:
    """Kinds of media by the token that stands for a piece of one."""
    found: dict[int, str] = {number: kind for kind, number in pad_ids_of(config).items()}
    for kind in ("image", "video", "audio"):
        number = tokenizer.token_to_id(f"<|{kind}_pad|>")
        if kind not in found.values() and number is not None:
            found[number] = kind
    return found


def _parts(sample: EncodedSample, tokenizer: Tokenizer, pads: Mapping[int, str]) -> Iterator[Part]:
    media: dict[str, list[Any]] = {
        "image": list(sample.images),
        "video": list(sample.videos),
        "audio": list(sample.audios),
    }
    at = 0
    while at < sample.length:
        kind = pads.get(int(sample.input_ids[at]))
        if kind is not None:
            # A sound track's placeholder tokens may come before its video's.
            if (
                kind == "audio"
                and media["video"]
                and media["video"][0].audio is not None
                and _in_video(sample, at, pads)
            ):
                kind = "video"
            if media[kind]:
                medium = media[kind].pop(0)
                at = _behind(sample, at, pads, medium)
                yield Part("media", medium_text(medium), medium=medium)
                continue
        stop, look, weight = _stretch(sample, at, pads)
        text = tokenizer.decode(sample.input_ids[at:stop].tolist(), skip_special_tokens=False)
        yield Part(look, text, weight)
        at = stop


def _in_video(sample: EncodedSample, at: int, pads: Mapping[int, str]) -> bool:
    """Whether a video's placeholder tokens come before the text goes on behind a run of sound."""
    while at < sample.length and pads.get(int(sample.input_ids[at])) == "audio":
        at += 1
    return at < sample.length and pads.get(int(sample.input_ids[at])) == "video"


def _behind(sample: EncodedSample, at: int, pads: Mapping[int, str], medium: Any) -> int:
    """The position behind a medium's last placeholder token; what lies between them is its own."""
    left = medium.num_tokens
    if isinstance(medium, EncodedVideo) and medium.audio is not None:
        left += medium.audio.num_tokens
    while left and at < sample.length:
        left -= int(sample.input_ids[at]) in pads
        at += 1
    return at


def _stretch(sample: EncodedSample, at: int, pads: Mapping[int, str]) -> tuple[int, Look, float]:
    """End, look and weight of the tokens from ``at`` on that look alike."""

    def look_of(i: int) -> tuple[Look, float]:
        if sample.labels[i] == IGNORE_INDEX:
            return "plain", 1.0
        return "trained", 1.0 if sample.loss_scale is None else float(sample.loss_scale[i])

    first = look_of(at)
    stop = at + 1
    while stop < sample.length and look_of(stop) == first and int(sample.input_ids[stop]) not in pads:
        stop += 1
    return stop, *first


def medium_text(medium: EncodedImage | EncodedVideo | EncodedAudio) -> str:
    """A medium in brackets: what it is, and what it costs."""
    tokens = f"{medium.num_tokens:,} tokens"
    if isinstance(medium, EncodedImage):
        return f"[image {medium.width}x{medium.height} -> {tokens}]"
    if isinstance(medium, EncodedAudio):
        return f"[audio {medium.num_samples / _SAMPLE_RATE:.1f} s -> {tokens}]"
    seconds = medium.num_frames / medium.fps if medium.fps else 0.0
    sound = f" and {medium.audio.num_tokens:,} of sound" if medium.audio is not None else ""
    size = f"{medium.width}x{medium.height} {seconds:.1f} s, {len(medium.indices)} frames"
    return f"[video {size} -> {tokens}{sound}]"


def all_media(sample: EncodedSample) -> list[EncodedImage | EncodedVideo | EncodedAudio]:
    """The media of a sample: pictures, then videos, then sounds."""
    return [*sample.images, *sample.videos, *sample.audios]


def find_damage(directory: str, progress: Progress) -> dict[str, Any]:
    """Read all files of a cache.

    Returns:
        directory, files, bytes, seconds, indexes without a checksum, damaged (file and problem), and the command that
        makes the cache anew where something is.

    Raises:
        MismatchError: if it is no finished cache, or its manifest is broken.
        StorageError: if it cannot be read.
    """
    directory = storage.normalize(directory)
    manifest = Manifest.read(directory)
    begin = time.perf_counter()
    progress.start("verify", sum(len(split.shards) + 1 for split in manifest.splits.values()))
    checks = []
    for check in check_all(directory, manifest):
        checks.append(check)
        progress.advance(1)
    progress.finish()
    damaged = [{"file": check.file, "problem": check.problem} for check in checks if check.problem]
    return {
        "directory": directory,
        "files": len(checks),
        "bytes": sum(check.bytes for check in checks),
        "seconds": round(time.perf_counter() - begin, 3),
        "without_checksum": [f"{name}/index.arrow" for name, info in manifest.splits.items() if not info.index_sha256],
        "damaged": damaged,
        "mend": repair_command(directory, manifest) if damaged else None,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """What ``packtool inspect --verify`` prints of these figures, line by line."""
    rate = found["bytes"] / 1e9 / found["seconds"] if found["seconds"] else 0.0
    told = [f"{found['directory']}: {found['files']} files, {found['bytes'] / 1e6:,.1f} MB read at {rate:.1f} GB/s"]
    told += [f"  {one['file']} {one['problem']}" for one in found["damaged"]]
    if found["without_checksum"]:
        told.append(f"made before indexes had checksums, so these could only be read: {found['without_checksum']}")
    if not found["damaged"]:
        return [*told, "all files are as they were exported"]
    mend = "Copy these files again from where they are whole, or make them again from the rows:"
    return [*told, f"{len(found['damaged'])} files are damaged. {mend}", f"  {found['mend']}"]
