"""Output of ``packtool inspect`` for a cache: its figures, damaged files, samples as text, and packs of a plan.

Boxes, points and polygons are parsed from a sample's text, to be drawn on its images. Their numbers are interpreted as
the model's family defines them, so a box that was scaled wrongly in the rows is drawn in the wrong place.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from packtool import storage
from packtool.cache.local import check_all
from packtool.cache.manifest import Identity, Manifest
from packtool.cache.output_dir import num_finished
from packtool.cache.plan_file import read_plan_of
from packtool.cache.reader import CacheReader
from packtool.cache.task import TASKS_DIR
from packtool.config.codes import with_code
from packtool.config.data import EncodeSpec
from packtool.config.settings import load_json
from packtool.constants import DROPPED_NAME, IGNORE_INDEX, MANIFEST_NAME
from packtool.encode.boxes import box_form_of, written_size
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import ImageLimits, pad_ids_of
from packtool.encode.families.record import INTERNVL_TOKENS, QWEN_TOKENS, BoxForm, BoxTokens
from packtool.encode.media_spans import MediaTokens, media_spans
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, MismatchError
from packtool.planning.prefix_trees import NOTHING, Branch, find_branches
from packtool.progress import Progress
from packtool.terminal import escape_line, escape_text
from packtool.train.prepare.caches import repair_command

PICTURE = "\ufffc"
"""Placeholder of an image in a sample's text."""
_NUMBER = r"-?\d{1,6}(?:\.\d+)?"
_LIST = rf"\[\s*{_NUMBER}(?:\s*,\s*{_NUMBER})+\s*\]"


def _box_pattern(tokens: BoxTokens, group: str) -> str:
    """Return a pattern of a box between tokens, optionally after its name; groups ``group`` and ``group_name``."""
    (name, name_end), (box, box_end) = ([*map(re.escape, pair)] for pair in (tokens.name, tokens.box))
    named = rf"{name}(?P<{group}_name>(?:(?!{name_end}).){{0,1000}}){name_end}\s*"
    return rf"(?:{named})?{box}(?P<{group}>{tokens.box_pattern}){box_end}"


_REGION = re.compile(
    rf"{_box_pattern(QWEN_TOKENS, 'pairs')}|{_box_pattern(INTERNVL_TOKENS, 'lists')}"
    # JSON names its numbers, and one list may hold several boxes.
    rf'|"\w+_2d"\s*:\s*(?P<json>{_LIST}|\[\s*{_LIST}(?:\s*,\s*{_LIST})*\s*\])'
    # In other text a list of four or more numbers is a box; a point must follow a quote, a word or "=".
    rf"|(?P<list>{_LIST})",
    re.DOTALL,
)
_STRING = r'"(?:label|text_content)"\s*:\s*(?P<label>"(?:[^"\\]|\\.){0,1000}")'
_LABEL_AFTER, _LABEL_BEFORE = re.compile(rf"\s*,\s*{_STRING}"), re.compile(rf"{_STRING}\s*,\s*$")
_MAX_LABEL_LENGTH = 1100
_NUMBER_PATTERN = re.compile(_NUMBER)
_NAME_TOKENS = re.compile("|".join(map(re.escape, (*QWEN_TOKENS.name, *INTERNVL_TOKENS.name))))
_MAX_EXAMPLES = 2
_SAMPLE_RATE = 16_000

Style = Literal["plain", "trained", "media", "truncated"]
Medium = EncodedImage | EncodedVideo | EncodedAudio


@dataclass(frozen=True)
class ShownRegion:
    """A point, box or polygon to draw on an image.

    Args:
        name: label in the text, or "".
        corners: (x, y) of each corner, as fractions of the image's width and height.
        image: number of the image in the sample.
        is_certain: True if the sample has no other image that the text could mean.
    """

    name: str
    corners: tuple[tuple[float, float], ...]
    image: int
    is_certain: bool

    @property
    def is_inside(self) -> bool:
        return all(0 <= coordinate <= 1 for corner in self.corners for coordinate in corner)

    def description(self, width: int, height: int) -> str:
        """Return name, kind and corners as text, in pixels of an image of this size."""
        kind = {1: "point", 2: "box"}.get(len(self.corners), "polygon")
        corners = " ".join(f"{x * width:.0f},{y * height:.0f}" for x, y in self.corners)
        outside = "" if self.is_inside else ", outside the image"
        doubt = "" if self.is_certain else ", unless it belongs to another image"
        return f"{self.name + ', ' if self.name else ''}{kind} {corners} of image {self.image}{outside}{doubt}"


def regions_of(
    text: str, images: Sequence[EncodedImage], form: BoxForm | None, limits: ImageLimits | None, is_complete: bool
) -> list[ShownRegion]:
    """Return the points, boxes and polygons that a sample's text describes, with the image of each.

    A region may refer to any image before it in the text, or to any image at all if none is before it. It is returned
    once for each of these images.

    Args:
        text: text of the sample, with ``PICTURE`` in place of each image.
        form: the notation of boxes in the model's family; None if the family has none.
        limits: size limits of images, which determine the size that coordinates refer to.
        is_complete: False if the sample was truncated, so that images may be missing.
    """
    if form is None or not images:
        return []
    regions: list[ShownRegion] = []
    is_only_image = is_complete and len(images) == 1
    for start, name, coordinates, is_marked in _read_regions(text):
        xs, ys = coordinates[::2], coordinates[1::2]
        # The first corner of a box (two corners) is the upper left one; other shapes have no order.
        is_ordered = len(xs) != 2 or (xs[0] <= xs[1] and ys[0] <= ys[1])
        num_candidates = text.count(PICTURE, 0, start) or len(images)
        for number, image in enumerate(images[:num_candidates]):
            width, height = written_size(form, image, limits)
            corners = tuple((x / width, y / height) for x, y in zip(xs, ys, strict=True))
            region = ShownRegion(name, corners, image=number, is_certain=is_only_image)
            # A list of numbers without special tokens or JSON around it may be no region: it must fit this image.
            if is_marked or (region.is_inside and is_ordered):
                regions.append(region)
    return regions


def _read_regions(text: str) -> Iterator[tuple[int, str, tuple[float, ...], bool]]:
    """Yield start, name, coordinates (x, y, x, y, ...) and ``is_marked`` of each region that a text describes.

    ``is_marked``: True if special tokens or JSON mark the numbers as a region; False for a plain list of numbers, which
    may be something else.
    """
    # One group of the pattern matches: ``pairs`` (Qwen's tokens), ``lists`` (InternVL's), ``json`` or a plain ``list``.
    for match in _REGION.finditer(text):
        is_marked = match["list"] is None
        label = match["pairs_name"] or match["lists_name"] or (_json_label(text, match) if is_marked else "")
        name = _NAME_TOKENS.sub("", label).strip()
        # Coordinates of a point often follow a quote, a letter or "="; other pairs of numbers rarely do.
        previous = text[max(match.start() - 1, 0) : match.start()]
        is_attached = previous.isalnum() or previous in ("'", '"', "=")
        if bracketed := match["json"] or match["lists"]:  # one or several boxes, each in brackets
            boxes = re.findall(r"\[[^\[\]]*\]", bracketed)
        else:
            boxes = [match["pairs"] or match["list"] or ""]
        for box in boxes:
            coordinates = tuple(map(float, _NUMBER_PATTERN.findall(box)))
            is_point = len(coordinates) == 2
            if len(coordinates) % 2 == 0 and (is_marked or is_attached or not is_point):
                yield match.start(), name, coordinates, is_marked


def _json_label(text: str, match: re.Match[str]) -> str:
    """Return the label in the JSON after or before a region, or ""."""
    before = text[max(match.start() - _MAX_LABEL_LENGTH, 0) : match.start()]
    label = _LABEL_AFTER.match(text, match.end()) or _LABEL_BEFORE.search(before)
    if label is None:
        return ""
    try:
        return str(json.loads(label["label"], strict=False))
    except ValueError:  # not valid JSON
        return label["label"][1:-1]


def cache_figures(directory: str) -> dict[str, Any]:
    """Return the output of ``packtool inspect --json``: figures of a cache's manifest, and examples of dropped rows.

    Raises:
        MismatchError: if the export of the cache is not finished.
    """
    directory = storage.normalize(directory)
    has_tasks = bool(storage.list_names(storage.join(directory, TASKS_DIR)))  # files of an unfinished export
    if has_tasks and not storage.exists(storage.join(directory, MANIFEST_NAME)):
        problem = f"{directory}: the export of this cache is not finished; {num_finished(directory)} shards are"
        raise MismatchError(problem, "Run the same packtool export command again to resume it.")
    manifest = Manifest.read(directory)
    identity = manifest.identity
    # Of the settings, list those that differ from their defaults; the model has its own entry.
    defaults = {field.name: field.default for field in dataclasses.fields(EncodeSpec)}
    settings = {name: value for name, value in identity.spec.items() if value not in (None, defaults.get(name))}
    settings.pop("model", None)
    output_names = {"rows": "num_samples", "shards": "num_shards"}  # by the field's name in the manifest
    splits = {}
    for split, info in manifest.splits.items():
        counts = dataclasses.asdict(info) | {"shards": len(info.shards)}  # the number of shards, not their names
        splits[split] = {output_names.get(name, name): value for name, value in counts.items()}
    examples: dict[str, list[dict[str, Any]]] = {}  # dropped rows by reason
    for row in dropped_rows(storage.join(directory, DROPPED_NAME)):
        reason_examples = examples.setdefault(row["reason"], [])
        if len(reason_examples) < _MAX_EXAMPLES:
            reason_examples.append(row)
    return {
        "directory": directory,
        "packtool_version": manifest.packtool_version,
        "fingerprint": manifest.fingerprint,
        "model": identity.spec["model"],
        "model_type": identity.model_type,
        "settings": settings,
        "media_limits": dataclasses.asdict(identity.media_limits),
        "sources": [dataclasses.asdict(source) for source in manifest.sources],
        "num_rows": manifest.rows,
        "marks_added": manifest.marks_added,
        "channels": list(manifest.channels),
        "dropped": dict(manifest.dropped),
        "parts_left_out": dict(manifest.parts_left_out),
        "dropped_examples": examples,
        "splits": splits,
        "max_length": manifest.max_length,
    }


def dropped_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the dropped rows of a ``dropped.jsonl``, without dropped parts of rows that were kept."""
    with storage.open_read(path) as file:
        yield from (row for row in map(load_json, file) if "part" not in row)


def figure_lines(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the figures of ``cache_figures`` as lines of a table."""
    lines = [
        ("model", f"{figures['model_type']}, {figures['model']}"),
        ("fingerprint", f"{figures['fingerprint']}, packtool {figures['packtool_version']}"),
        *((f"  {name}", str(value)) for name, value in figures["settings"].items()),
    ]
    for source in figures["sources"]:
        lines.append((source["path"], f"{source['rows']:,} rows {source['settings']}".strip()))
    lines.append(("input rows", f"{figures['num_rows']:,}"))
    for name, split in figures["splits"].items():
        num_rows = split["num_samples"] - split["pieces_added"]  # a row that was split has added further samples
        rows = f" from {num_rows:,} rows" if split["pieces_added"] else ""
        target_fraction = split["target_tokens"] / max(split["tokens"], 1)
        lines += [
            (name, f"{split['num_samples']:,} samples{rows} in {split['num_shards']} shards"),
            ("  tokens", f"{split['tokens']:,}"),
            ("  target tokens", f"{split['target_tokens']:,} ({target_fraction:.1%})"),
            ("  media tokens", f"{split['media_tokens']:,}"),
            ("  truncated", f"{split['truncated']:,} samples, {split['truncated_tokens']:,} tokens"),
        ]
    if figures["parts_left_out"]:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in figures["parts_left_out"].items())
        lines.append(("turns and responses left out", counts))
    lines.append(("dropped", f"{sum(figures['dropped'].values()):,}"))
    for reason, count in figures["dropped"].items():
        lines.append((f"  {with_code(reason)}", f"{count:,}"))
        for row in figures["dropped_examples"].get(reason, ()):
            lines.append((f"    {row['source']}, row {row['row']}", row["detail"]))
    return lines


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a sample that are shown in one style.

    Args:
        text: of the tokens; a description in brackets for media and for truncated tokens.
        weight: loss weight of trained tokens.
        medium: the medium of placeholder tokens.
    """

    style: Style
    text: str
    weight: float = 1.0
    medium: Medium | None = None

    @property
    def weighted_text(self) -> str:
        """The text, preceded by its loss weight if that is not 1."""
        return f"{self.weight:g}:{self.text}" if self.style == "trained" and self.weight != 1 else self.text


def marked_text(parts: Iterable[Part]) -> str:
    """Return a sample as text without colors: trained text is between « and »."""
    texts = (f"«{part.weighted_text}»" if part.style == "trained" else part.weighted_text for part in parts)
    return escape_text("".join(texts))


def sample_view(
    directory: str, split: str, row: int, model: str | None = None
) -> tuple[list[tuple[str, str]], list[Part]]:
    """Return facts about a sample of a cache as (name, value), and its decoded parts.

    ``row`` is the sample's position in the split. ``model`` is the directory with the tokenizer, by default the
    directory that the cache was exported with.
    """
    reader = CacheReader.open([directory], split)
    if not 0 <= row < len(reader):
        raise ConfigError(f"--row {row}: the {split} split has samples 0 to {len(reader) - 1}")
    sample = reader.sample(row)
    decoder = Decoder(model_of_cache(reader, model), reader.manifests[0].identity)
    num_trained = int((sample.labels != IGNORE_INDEX).sum())
    facts = [("source", f"{sample.source}, row {sample.row}")]
    if sample.part is not None:
        facts.append(("part of its row", str(sample.part)))
    facts.append(("channel", sample.channel or "none"))
    facts.append(("tokens", f"{sample.length:,}, {num_trained:,} of them trained"))
    if sample.num_truncated:
        facts.append(("truncated", f"{sample.num_truncated:,} tokens"))
    parts = decoder.parts(sample)
    for number, region in enumerate(decoder.regions(sample, parts), start=1):
        image = sample.images[region.image]
        facts.append((f"place {number}", region.description(image.width, image.height)))
    return facts, parts


class Decoder:
    """Decodes the samples of a cache, with the files of the model that it was exported for."""

    def __init__(self, files: ModelFiles, identity: Identity) -> None:
        self._truncation_strategy = str(identity.spec.get("truncation_strategy"))
        self._trims_media = identity.spec.get("media_overflow") == "trim"
        self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        self._image_limits = identity.media_limits.image
        self._box_form = box_form_of(files.config, identity.spec.get("bbox_format"), identity.spec.get("norm_bbox"))
        # Kind of media ("image", "video", "audio") by the ID of its placeholder token.
        self._media_kinds: dict[int, str] = {token_id: kind for kind, token_id in pad_ids_of(files.config).items()}
        for kind in ("image", "video", "audio"):
            token_id = self._tokenizer.token_to_id(f"<|{kind}_pad|>")
            if kind not in self._media_kinds.values() and token_id is not None:
                self._media_kinds[token_id] = kind

    def parts(self, sample: EncodedSample) -> list[Part]:
        """Return the parts of a sample in order, with one for truncated tokens; a cache stores only their number."""
        parts = list(self._kept_parts(sample))
        if sample.num_truncated:
            removed = "its oldest media"
            if self._truncation_strategy in ("left", "right"):
                end = "its beginning" if self._truncation_strategy == "left" else "its end"
                removed = f"{end}, or of {removed}" if self._trims_media else end
            truncated = Part("truncated", f"[{sample.num_truncated:,} tokens of {removed} were truncated]")
            parts.insert(len(parts) if self._truncation_strategy == "right" else 0, truncated)
        return parts

    def _kept_parts(self, sample: EncodedSample) -> Iterator[Part]:
        """Yield the parts of a sample that were not truncated: a medium each, or text of one style and weight."""
        pending_media: dict[str, list[Medium]] = {  # media of each kind that were not yielded yet
            "image": [*sample.images],
            "video": [*sample.videos],
            "audio": [*sample.audios],
        }
        # For each token, the kind of media that it is a placeholder of; None for text.
        kinds = [self._media_kinds.get(token) for token in sample.input_ids.tolist()]
        is_trained = sample.labels != IGNORE_INDEX
        weights = np.where(is_trained, 1.0 if sample.loss_scale is None else sample.loss_scale, 1.0)
        index = 0  # of the first token that was not yielded yet
        while index < sample.length:
            kind, videos = kinds[index], pending_media["video"]
            if kind == "audio" and videos and getattr(videos[0], "audio", None) is not None:
                # The placeholder tokens of a video's sound track may come before those of its frames.
                next_kind = next((later for later in kinds[index:] if later != "audio"), None)
                kind = "video" if next_kind == "video" else kind
            if kind is not None and pending_media[kind]:
                medium = pending_media[kind].pop(0)
                num_placeholders = medium.num_tokens
                if isinstance(medium, EncodedVideo) and medium.audio is not None:
                    num_placeholders += medium.audio.num_tokens
                # Text between a medium's placeholder tokens, such as timestamps, belongs to the medium.
                while num_placeholders and index < sample.length:
                    num_placeholders -= kinds[index] is not None
                    index += 1
                yield Part("media", medium_text(medium), medium=medium)
                continue
            start = index
            style = (is_trained[start], weights[start])
            index += 1
            while index < sample.length and kinds[index] is None and (is_trained[index], weights[index]) == style:
                index += 1
            text = self._tokenizer.decode(sample.input_ids[start:index].tolist(), skip_special_tokens=False)
            yield Part("trained" if is_trained[start] else "plain", text, float(weights[start]))

    def regions(self, sample: EncodedSample, parts: Sequence[Part]) -> list[ShownRegion]:
        text = "".join(PICTURE if isinstance(part.medium, EncodedImage) else part.text for part in parts)
        is_complete = not sample.num_truncated
        return regions_of(text, sample.images, self._box_form, self._image_limits, is_complete)


def model_of_cache(reader: CacheReader, model: str | None = None) -> ModelFiles:
    """Read the files of the model that a cache was exported for, or of ``model`` if given."""
    exported_for = str(reader.manifests[0].identity.spec["model"])
    try:
        return ModelFiles.load(model or exported_for)
    except ConfigError as error:
        if model is not None:
            raise
        raise ConfigError(
            f"{reader.directories[0]} was exported for {exported_for}, which cannot be read here: {error.message}",
            "Give the model's present directory: --model DIR.",
        ) from error


def medium_text(medium: Medium) -> str:
    """Describe a medium in brackets, with its size or duration and its number of tokens."""
    tokens = f"{medium.num_tokens:,} tokens"
    if isinstance(medium, EncodedImage):
        return f"[image {medium.width}x{medium.height} -> {tokens}]"
    if isinstance(medium, EncodedAudio):
        return f"[audio {medium.num_samples / _SAMPLE_RATE:.1f} s -> {tokens}]"
    seconds = medium.num_frames / medium.fps if medium.fps else 0.0
    sound = f" and {medium.audio.num_tokens:,} of sound" if medium.audio is not None else ""
    size = f"{medium.width}x{medium.height} {seconds:.1f} s, {len(medium.indices)} frames"
    return f"[video {size} -> {tokens}{sound}]"


def damage_figures(directory: str, progress: Progress) -> dict[str, Any]:
    """Compare all files of a cache with its manifest, for ``packtool inspect --verify``.

    In the result, ``damaged`` lists files with their problems, and ``mend`` is the command that repairs the cache.
    """
    directory = storage.normalize(directory)
    manifest = Manifest.read(directory)
    begin = time.perf_counter()
    progress.start("verify", sum(len(split.shards) + 1 for split in manifest.splits.values()))  # shards and an index
    damaged = []
    num_files = total_bytes = 0
    for name, problem, num_bytes in check_all(directory, manifest):
        num_files += 1
        total_bytes += num_bytes
        if problem:
            damaged.append({"file": name, "problem": problem})
        progress.advance(1)
    progress.finish()
    return {
        "directory": directory,
        "num_files": num_files,
        "bytes": total_bytes,
        "seconds": round(time.perf_counter() - begin, 3),
        "without_checksum": [f"{name}/index.arrow" for name, info in manifest.splits.items() if not info.index_sha256],
        "damaged": damaged,
        "mend": repair_command(directory, manifest) if damaged else None,
    }


def damage_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the output of ``packtool inspect --verify``."""
    gb_per_second = figures["bytes"] / 1e9 / figures["seconds"] if figures["seconds"] else 0.0
    size = f"{figures['bytes'] / 1e6:,.1f} MB read at {gb_per_second:.1f} GB/s"
    yield f"{figures['directory']}: {figures['num_files']} files, {size}"
    for each in figures["damaged"]:
        yield f"  {each['file']} {each['problem']}"
    if figures["without_checksum"]:
        files = ", ".join(figures["without_checksum"])
        yield f"no checksum was recorded for {files} (older packtool); checked only that they can be read"
    if not figures["damaged"]:
        yield "no file is damaged"
        return
    remedy = "Copy them again from an undamaged copy of the cache, or export them again from the rows:"
    yield f"{len(figures['damaged'])} files are damaged. {remedy}"
    yield f"  {figures['mend']}"


def pack_figures(directory: str, plan: str, pack: int, model: str | None = None) -> dict[str, Any]:
    """Describe a pack of a saved plan: its shared prefixes, the tokens that each sample adds, and trained tokens.

    ``plan`` is the path of the plan. ``model`` is the directory of the model, by default the one that the cache was
    exported with; it is read only to locate media in shared prefixes.

    Returns:
        ``prefixes`` and ``samples``, each with its tokens in the pack (from ``start`` to before ``end``), the first and
        last of its ``positions`` in the samples, the number of the ``prefix`` that it continues, and the ``trained``
        ranges of tokens in the pack.
    """
    reader = CacheReader.open([directory])
    saved_plan = read_plan_of(reader, plan)
    num_packs = len(saved_plan.offsets) - 1
    if not 0 <= pack < num_packs:
        raise ConfigError(f"--pack {pack}: the plan has packs 0 to {num_packs - 1}")
    in_pack = slice(int(saved_plan.offsets[pack]), int(saved_plan.offsets[pack + 1]))
    shared = None if saved_plan.shared is None else saved_plan.shared[in_pack]
    branches = find_branches(saved_plan.lengths[in_pack], shared)
    sample_numbers = saved_plan.samples[in_pack].tolist()
    samples = [reader.sample(number) for number in sample_numbers]
    media_tokens = None
    if any(branch.num_samples > 1 for branch in branches) and any(sample.media for sample in samples):
        media_tokens = MediaTokens.of(model_of_cache(reader, model).config)
    prefixes, sample_figures = _branch_figures(branches, sample_numbers, samples, media_tokens)
    return {
        "pack": pack,
        "tokens": sum(branch.num_tokens for branch in branches),
        "tokens_without": sum(sample.length for sample in samples),
        "packing_length": saved_plan.capacity,
        "prefixes": prefixes,
        "samples": sample_figures,
    }


def _branch_figures(
    branches: Sequence[Branch],
    sample_numbers: Sequence[int],
    samples: Sequence[EncodedSample],
    media_tokens: MediaTokens | None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return figures of the shared prefixes, and of the tokens that each sample adds to them, in the order of the pack.

    Args:
        branches: the branches of the pack, parents first: shared prefixes, and the tokens that a single sample adds.
        media_tokens: locates media in samples; None if every sample of a branch has all of its media in that branch.
    """
    prefixes: list[dict[str, Any]] = []
    sample_figures: list[dict[str, Any]] = []
    prefix_numbers: dict[int, int | None] = {NOTHING: None}  # number of a prefix by the index of its branch
    pack_start = 0  # start of the branch in the pack; ``branch.start`` is its start in each of its samples
    for index, branch in enumerate(branches):
        branch_samples = samples[branch.first : branch.last]
        labels = np.stack([sample.labels[branch.start : branch.stop] for sample in branch_samples])
        is_trained = (labels != IGNORE_INDEX).any(axis=0)  # a prefix token may be a target of only some samples
        # Positions in the pack where ranges of trained tokens begin and end: begin, end, begin, end, ...
        trained_edges = pack_start + np.flatnonzero(np.diff(np.concatenate(([0], is_trained, [0]))))
        first_sample = branch_samples[0]
        media = first_sample.media
        if media_tokens is not None:
            spans = media_spans(first_sample, media_tokens)
            media = [span.medium for span in spans if branch.start <= span.start < branch.stop]
        figures = {
            "start": pack_start,
            "end": pack_start + branch.num_tokens,
            "positions": [branch.start, branch.stop - 1],
            "prefix": prefix_numbers[branch.parent],
            "trained": trained_edges.reshape(-1, 2).tolist(),
            "media": list(map(medium_text, media)),
        }
        if branch.num_samples > 1:
            prefix_numbers[index] = len(prefixes)
            prefixes.append({"samples": list(sample_numbers[branch.first : branch.last]), **figures})
        else:
            part = "" if first_sample.part is None else str(first_sample.part)
            origin = {"source": first_sample.source, "row": first_sample.row, "part": part}
            sample_figures.append({"sample": sample_numbers[branch.first], **origin, **figures})
        pack_start += branch.num_tokens
    return prefixes, sample_figures


def pack_lines(pack: Mapping[str, Any]) -> Iterator[str]:
    """Yield the output of ``packtool inspect --pack`` for a result of ``pack_figures``; shared prefixes are trees."""
    tokens, capacity, unshared_tokens = pack["tokens"], pack["packing_length"], pack["tokens_without"]
    without = f", {unshared_tokens:,} without shared prefixes" if unshared_tokens > tokens else ""
    fill = f"{tokens:,} of {capacity:,} tokens ({tokens / capacity:.2%})"
    yield f"pack {pack['pack']}: {len(pack['samples'])} samples, {fill}{without}"
    # The nodes of the trees, parents first; a node's parent is the prefix with the number ``node["prefix"]``, or None.
    nodes = sorted([*pack["prefixes"], *pack["samples"]], key=lambda node: node["start"])
    last_child = {node["prefix"]: node for node in nodes}  # by the number of the parent
    # Characters that draw the tree in front of a node's line, by the number of its parent.
    indents: dict[int | None, str] = {None: ""}
    for node in nodes:
        first, last = node["positions"]
        num_tokens = last - first + 1
        is_prefix = "samples" in node
        if is_prefix:
            num_samples = len(node["samples"])
            name = f"prefix of {num_samples} samples, {num_tokens:,} tokens instead of {num_samples * num_tokens:,}"
        else:
            name = f"sample {node['sample']}: {escape_line(node['source'])}, row {node['row']}"
            name += f", {node['part']}" if node["part"] else ""
            if node["prefix"] is not None:
                name += f", adds {num_tokens:,} of its {last + 1:,} tokens"
        indent = indent_below = indents[node["prefix"]]
        if node["prefix"] is not None:
            is_last_child = last_child[node["prefix"]] is node
            indent += "└─ " if is_last_child else "├─ "
            indent_below += "   " if is_last_child else "│  "
        if is_prefix:
            indents[len(indents) - 1] = indent_below  # prefixes are numbered in the order of the nodes, from 0
        yield f"  {indent}[{node['start']:>6}, {node['end']:>6})  positions {first}-{last}  {name}"
        details = list(node["media"])
        if node["trained"]:
            details.insert(0, "trained " + " ".join(f"{start}-{end}" for start, end in node["trained"]))
        if details:
            yield f"  {indent_below}{'│  ' if is_prefix else '    '}{'   '.join(details)}"
