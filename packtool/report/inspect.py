"""Output of ``packtool inspect`` for a cache: its figures, damaged files, samples as text, and packs of a plan."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from packtool import storage
from packtool.cache.local import check_all
from packtool.cache.manifest import Identity, Manifest, SplitInfo
from packtool.cache.output_dir import num_finished
from packtool.cache.plan_file import SavedPlan, read_plan_of
from packtool.cache.reader import CacheReader
from packtool.cache.task import TASKS_DIR
from packtool.config.codes import with_code
from packtool.config.data import EncodeSpec
from packtool.config.settings import load_json
from packtool.constants import DROPPED_NAME, IGNORE_INDEX, MANIFEST_NAME
from packtool.encode.boxes import box_form_of
from packtool.encode.encoded import EncodedAudio, EncodedImage, EncodedSample, EncodedVideo
from packtool.encode.families import MediaLimits, pad_ids_of
from packtool.encode.media_spans import MediaTokens, media_spans
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, MismatchError
from packtool.planning.prefix_branches import Branch, find_branches
from packtool.progress import Progress
from packtool.report.regions import PICTURE, ShownRegion, regions_of
from packtool.report.tables import Figures, Line, filled_lines
from packtool.terminal import escape_line, escape_text
from packtool.train.prepare.caches import repair_command

_MAX_EXAMPLES = 2
_SAMPLE_RATE = 16_000

Style = Literal["plain", "trained", "media", "truncated"]
Medium = EncodedImage | EncodedVideo | EncodedAudio


def cache_figures(directory: str) -> dict[str, Any]:
    """Return the output of ``packtool inspect --json``: figures of a cache's manifest, and examples of dropped rows.

    ``settings`` are those of the export that differ from their defaults. ``dropped`` counts rows by reason, and
    ``parts_left_out`` turns and responses of rows that were kept.
    """
    directory = storage.normalize(directory)
    _check_export_finished(directory)
    manifest = Manifest.read(directory)
    identity = manifest.identity
    return {
        "directory": directory,
        "packtool_version": manifest.packtool_version,
        "fingerprint": manifest.fingerprint,
        "model": identity.spec["model"],
        "model_type": identity.model_type,
        "settings": _changed_settings(identity),
        "media_limits": dataclasses.asdict(identity.media_limits),
        "sources": [dataclasses.asdict(source) for source in manifest.sources],
        "num_rows": manifest.rows,
        "marks_added": manifest.marks_added,
        "channels": list(manifest.channels),
        "dropped": dict(manifest.dropped),
        "parts_left_out": dict(manifest.parts_left_out),
        "dropped_examples": _dropped_examples(directory),
        "splits": {name: _split_figures(split) for name, split in manifest.splits.items()},
        "max_length": manifest.max_length,
    }


def _check_export_finished(directory: str) -> None:
    has_tasks = bool(storage.list_names(storage.join(directory, TASKS_DIR)))  # files of an unfinished export
    if has_tasks and not storage.exists(storage.join(directory, MANIFEST_NAME)):
        problem = f"{directory}: the export of this cache is not finished; {num_finished(directory)} shards are"
        raise MismatchError(problem, "Run the same packtool export command again to resume it.")


def _changed_settings(identity: Identity) -> dict[str, Any]:
    """Return the settings of an export that differ from their defaults, without the model."""
    defaults = {field.name: field.default for field in dataclasses.fields(EncodeSpec)}
    settings = {name: value for name, value in identity.spec.items() if value not in (None, defaults.get(name))}
    settings.pop("model", None)
    return settings


def _split_figures(split: SplitInfo) -> dict[str, Any]:
    """Return the counts of a split, with the number of its shards instead of their names."""
    counts = dataclasses.asdict(split) | {"shards": len(split.shards)}
    output_names = {"rows": "num_samples", "shards": "num_shards"}  # by the field's name in the manifest
    return {output_names.get(name, name): value for name, value in counts.items()}


def _dropped_examples(directory: str) -> dict[str, list[dict[str, Any]]]:
    """Return the first dropped rows of a cache for each reason."""
    examples: dict[str, list[dict[str, Any]]] = {}
    for row in dropped_rows(storage.join(directory, DROPPED_NAME)):
        rows_of_reason = examples.setdefault(row["reason"], [])
        if len(rows_of_reason) < _MAX_EXAMPLES:
            rows_of_reason.append(row)
    return examples


def dropped_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the dropped rows of a ``dropped.jsonl``, without dropped parts of rows that were kept."""
    with storage.open_read(path) as file:
        yield from (row for row in map(load_json, file) if "part" not in row)


def figure_lines(figures: Figures) -> list[Line]:
    """Return the figures of ``cache_figures`` as lines of a table."""
    lines = [
        ("model", f"{figures['model_type']}, {figures['model']}"),
        ("fingerprint", f"{figures['fingerprint']}, packtool {figures['packtool_version']}"),
    ]
    for name, value in figures["settings"].items():
        lines.append((f"  {name}", str(value)))
    for source in figures["sources"]:
        lines.append((source["path"], f"{source['rows']:,} rows {source['settings']}".strip()))
    lines.append(("input rows", f"{figures['num_rows']:,}"))
    for name, split in figures["splits"].items():
        num_rows = split["num_samples"] - split["pieces_added"]  # a row that was split has added further samples
        rows = f" from {num_rows:,} rows" if split["pieces_added"] else ""
        target_share = split["target_tokens"] / max(split["tokens"], 1)
        lines += filled_lines("inspect split", {**split, "name": name, "rows": rows, "target_share": target_share})
    return lines + _dropped_lines(figures)


def _dropped_lines(figures: Figures) -> list[Line]:
    """Return the lines on parts of rows that were left out, and on dropped rows with examples for each reason."""
    lines = []
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
    """Tokens of a sample in one style and, if trained, of one loss weight; media and truncated ones are described."""

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


def sample_view(directory: str, split: str, row: int, model: str | None = None) -> tuple[list[Line], list[Part]]:
    """Return facts about sample ``row`` of a split as (name, value), and its parts; ``model`` if it has moved."""
    reader = CacheReader.open([directory], split)
    if not 0 <= row < len(reader):
        raise ConfigError(f"--row {row}: the {split} split has samples 0 to {len(reader) - 1}")
    sample = reader.sample(row)
    identity = reader.manifests[0].identity
    decoder = Decoder(model_of_cache(reader, model), identity.spec, identity.media_limits)
    parts = decoder.parts(sample)
    facts = _sample_facts(sample)
    for number, region in enumerate(decoder.regions(sample, parts), start=1):
        image = sample.images[region.image]
        facts.append((f"place {number}", region.description(image.width, image.height)))
    return facts, parts


def _sample_facts(sample: EncodedSample) -> list[Line]:
    """Return the origin and the numbers of tokens of a sample as (name, value)."""
    num_trained = int((sample.labels != IGNORE_INDEX).sum())
    facts = [("source", f"{sample.source}, row {sample.row}")]
    if sample.part is not None:
        facts.append(("part of its row", str(sample.part)))
    facts.append(("channel", sample.channel or "none"))
    facts.append(("tokens", f"{sample.length:,}, {num_trained:,} of them trained"))
    if sample.num_truncated:
        facts.append(("truncated", f"{sample.num_truncated:,} tokens"))
    return facts


class Decoder:
    """Decodes samples with the files of their model; ``spec``: ``EncodeSpec.recorded`` of their export."""

    def __init__(self, files: ModelFiles, spec: Mapping[str, Any], media_limits: MediaLimits) -> None:
        self._truncation_strategy = str(spec.get("truncation_strategy"))
        self._trims_media = spec.get("media_overflow") == "trim"
        self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        self._image_limits = media_limits.image
        self._box_form = box_form_of(files.config, spec.get("bbox_format"), spec.get("norm_bbox"))
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
            end = {"left": "its beginning", "right": "its end"}.get(self._truncation_strategy)
            places = [*([end] if end else []), *(["its oldest media"] if self._trims_media or not end else [])]
            text = f"[{sample.num_truncated:,} tokens of {', or of '.join(places)} were truncated]"
            position = len(parts) if self._truncation_strategy == "right" else 0
            parts.insert(position, Part("truncated", text))
        return parts

    def _kept_parts(self, sample: EncodedSample) -> Iterator[Part]:
        """Yield the stored parts of a sample in order: a medium each, or text of one style and loss weight.

        A medium takes the placeholder tokens of its kind, as many as it has; the sample lists the media of a kind in
        the order of these tokens. Placeholder tokens without a medium are shown as text.
        """
        remaining_media: dict[str, list[Medium]] = {
            "image": [*sample.images],
            "video": [*sample.videos],
            "audio": [*sample.audios],
        }
        # Of each token, the kind of media that it is a placeholder of; None for text.
        kinds = [self._media_kinds.get(token) for token in sample.input_ids.tolist()]
        styles = _styles(sample)
        position = 0
        while position < sample.length:
            kind = _kind_of_medium(kinds, position, remaining_media["video"])
            if kind is not None and remaining_media[kind]:
                medium = remaining_media[kind].pop(0)
                yield Part("media", medium_text(medium), medium=medium)
                position = _end_of_medium(kinds, position, medium)
            else:
                text_end = _end_of_text(kinds, position, styles)
                style, weight = styles[position]
                yield self._text_part(sample.input_ids[position:text_end].tolist(), style, weight)
                position = text_end

    def _text_part(self, tokens: Sequence[int], style: Style, weight: float) -> Part:
        return Part(style, self._tokenizer.decode(tokens, skip_special_tokens=False), weight)

    def regions(self, sample: EncodedSample, parts: Sequence[Part]) -> list[ShownRegion]:
        text = "".join(PICTURE if isinstance(part.medium, EncodedImage) else part.text for part in parts)
        is_complete = not sample.num_truncated
        return regions_of(text, sample.images, self._box_form, self._image_limits, is_complete)


def _styles(sample: EncodedSample) -> list[tuple[Style, float]]:
    """Return the style and loss weight of each token as text."""
    weights = [1.0] * sample.length if sample.loss_scale is None else sample.loss_scale.tolist()
    targets = (sample.labels != IGNORE_INDEX).tolist()
    pairs = zip(targets, weights, strict=True)
    return [("trained", weight) if is_target else ("plain", 1.0) for is_target, weight in pairs]


def _kind_of_medium(kinds: Sequence[str | None], start: int, pending_videos: Sequence[Medium]) -> str | None:
    """Return the kind of the medium at ``start``; None for text. A video may begin with its sound track."""
    kind = kinds[start]
    next_video = pending_videos[0] if pending_videos else None
    if kind == "audio" and isinstance(next_video, EncodedVideo) and next_video.audio is not None:
        next_kind = next((later for later in kinds[start:] if later != "audio"), None)
        if next_kind == "video":
            return "video"
    return kind


def _end_of_medium(kinds: Sequence[str | None], start: int, medium: Medium) -> int:
    """Return the position after a medium's placeholder tokens; text between them, such as timestamps, belongs to it."""
    num_placeholders = medium.num_tokens
    if isinstance(medium, EncodedVideo) and medium.audio is not None:
        num_placeholders += medium.audio.num_tokens
    end = start
    while num_placeholders and end < len(kinds):
        if kinds[end] is not None:
            num_placeholders -= 1
        end += 1
    return end


def _end_of_text(kinds: Sequence[str | None], start: int, styles: Sequence[tuple[Style, float]]) -> int:
    """Return the end of the text tokens from ``start`` on that have one style and weight."""
    end = start + 1
    while end < len(kinds) and kinds[end] is None and styles[end] == styles[start]:
        end += 1
    return end


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
    """Compare all files of a cache with its manifest; return their number and size, and the damaged ones.

    ``mend`` is the command that repairs the cache, None if nothing is damaged. ``without_checksum`` are index files of
    older caches, of which the manifest has no checksum.
    """
    directory = storage.normalize(directory)
    manifest = Manifest.read(directory)
    splits = manifest.splits
    num_expected = sum(len(split.shards) + 1 for split in splits.values())  # shards and an index
    begin = time.perf_counter()
    progress.start("verify", num_expected)
    damaged = []
    num_files = 0
    total_bytes = 0
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
        "without_checksum": [f"{name}/index.arrow" for name, split in splits.items() if not split.index_sha256],
        "damaged": damaged,
        "mend": repair_command(directory, manifest) if damaged else None,
    }


def damage_lines(figures: Figures) -> Iterator[str]:
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
    """Describe pack number ``pack`` of a saved plan as a tree of shared prefixes and samples.

    ``directory`` is that of the cache, ``plan`` the path of the plan. ``model`` is the directory of the model, by
    default that of the export; it is read only to locate media in shared prefixes.
    """
    reader = CacheReader.open([directory])
    saved_plan = read_plan_of(reader, plan)
    sample_numbers, branches = _content_of_pack(saved_plan, pack)
    samples = [reader.sample(number) for number in sample_numbers]

    has_prefixes = any(branch.num_samples > 1 for branch in branches)
    has_media = any(sample.media for sample in samples)
    media_tokens = None
    if has_prefixes and has_media:
        media_tokens = MediaTokens.of(model_of_cache(reader, model).config)
    prefixes, sample_figures = _branch_figures(branches, sample_numbers, samples, media_tokens)
    return {
        "pack": pack,
        "tokens": sum(branch.num_tokens for branch in branches),
        "tokens_without": sum(sample.length for sample in samples),  # without sharing
        "packing_length": saved_plan.capacity,
        "prefixes": prefixes,
        "samples": sample_figures,
    }


def _content_of_pack(plan: SavedPlan, pack: int) -> tuple[list[int], list[Branch]]:
    """Return the samples of a pack, as positions in the cache, and their branches; raise if there is no such pack."""
    num_packs = len(plan.offsets) - 1
    if not 0 <= pack < num_packs:
        raise ConfigError(f"--pack {pack}: the plan has packs 0 to {num_packs - 1}")
    in_pack = slice(int(plan.offsets[pack]), int(plan.offsets[pack + 1]))
    shared = None if plan.shared_tokens is None else plan.shared_tokens[in_pack]
    return plan.samples[in_pack].tolist(), find_branches(plan.lengths[in_pack], shared)


def _branch_figures(
    branches: Sequence[Branch],
    sample_numbers: list[int],
    samples: Sequence[EncodedSample],
    media_tokens: MediaTokens | None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the figures of the branches of a pack: of shared prefixes, and of the tokens that single samples add.

    A branch is a range of tokens of the pack that belongs to one or more samples. It may continue another branch, its
    parent, which is before it. ``start`` and ``end`` are its range in the pack, ``positions`` those of its first and
    last token in each sample, and ``prefix`` is the number of its parent among the shared prefixes, None without one.
    """
    prefixes: list[dict[str, Any]] = []
    own_tokens: list[dict[str, Any]] = []
    prefix_number_by_branch: dict[int, int] = {}
    pack_start = 0
    for branch_index, branch in enumerate(branches):
        branch_samples = samples[branch.first_sample : branch.stop_sample]
        branch_numbers = sample_numbers[branch.first_sample : branch.stop_sample]
        figures = {
            "start": pack_start,
            "end": pack_start + branch.num_tokens,
            "positions": [branch.start, branch.stop - 1],
            "prefix": prefix_number_by_branch.get(branch.parent),
            "trained": _trained_ranges(branch, branch_samples, pack_start),
            "media": _media_texts(branch, branch_samples[0], media_tokens),
        }
        is_shared = branch.num_samples > 1
        if is_shared:
            prefix_number_by_branch[branch_index] = len(prefixes)
            prefixes.append({"samples": branch_numbers, **figures})
        else:
            origin = _origin_figures(branch_numbers[0], branch_samples[0])
            own_tokens.append({**origin, **figures})
        pack_start += branch.num_tokens
    return prefixes, own_tokens


def _trained_ranges(branch: Branch, samples: Sequence[EncodedSample], pack_start: int) -> list[list[int]]:
    """Return [begin, end) of each range of trained tokens of a branch, as positions in the pack."""
    labels = np.stack([sample.labels[branch.start : branch.stop] for sample in samples])
    is_trained = (labels != IGNORE_INDEX).any(axis=0)  # a prefix token may be a target of only some samples
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_trained, [0]))))  # begin, end, begin, end, ...
    ranges: list[list[int]] = (pack_start + edges).reshape(-1, 2).tolist()
    return ranges


def _media_texts(branch: Branch, sample: EncodedSample, media_tokens: MediaTokens | None) -> list[str]:
    """Describe the media in a branch of a sample, or all of the sample without ``media_tokens``."""
    if media_tokens is None:
        return [medium_text(medium) for medium in sample.media]
    spans = media_spans(sample, media_tokens)
    return [medium_text(span.medium) for span in spans if branch.start <= span.start < branch.stop]


def _origin_figures(number: int, sample: EncodedSample) -> dict[str, Any]:
    """Return number, source, row and part of a sample."""
    part = "" if sample.part is None else str(sample.part)
    return {"sample": number, "source": sample.source, "row": sample.row, "part": part}


def pack_lines(pack: Figures) -> Iterator[str]:
    """Yield the output of ``packtool inspect --pack`` for a result of ``pack_figures``; shared prefixes are trees."""
    num_tokens = pack["tokens"]
    num_unshared = pack["tokens_without"]
    without = f", {num_unshared:,} without shared prefixes" if num_unshared > num_tokens else ""
    fill = f"{num_tokens:,} of {pack['packing_length']:,} tokens ({num_tokens / pack['packing_length']:.2%})"
    yield f"pack {pack['pack']}: {len(pack['samples'])} samples, {fill}{without}"
    yield from _tree_lines(sorted([*pack["prefixes"], *pack["samples"]], key=lambda node: node["start"]))


def _tree_lines(nodes: Sequence[Figures]) -> Iterator[str]:
    """Yield lines of text that draw the nodes of a pack as trees, with ``├─`` and ``└─`` before children.

    A node is either a prefix, which several samples share, or the rest of one sample. ``node["prefix"]`` is the number
    of its parent, which is a prefix, or None for a root. Prefixes are numbered from 0 in the order of ``nodes``, and
    parents come before their children. A node takes one line, and a second one if it has details.
    """
    last_child_by_parent = {node["prefix"]: node for node in nodes}  # later nodes replace earlier ones
    prefix_indents: list[str] = []  # for the lines below each prefix, by its number
    for node in nodes:
        parent = node["prefix"]
        if parent is None:
            first_indent = ""
            next_indent = ""
        elif node is last_child_by_parent[parent]:
            first_indent = prefix_indents[parent] + "└─ "
            next_indent = prefix_indents[parent] + "   "
        else:
            first_indent = prefix_indents[parent] + "├─ "
            next_indent = prefix_indents[parent] + "│  "  # continues the line to the next child
        yield f"  {first_indent}{_node_summary(node)}"

        is_prefix = "samples" in node
        if is_prefix:
            prefix_indents.append(next_indent)
            details_indent = next_indent + "│  "  # a prefix has children below its details
        else:
            details_indent = next_indent + "    "
        details = _node_details(node)
        if details:
            yield f"  {details_indent}{details}"


def _node_summary(node: Figures) -> str:
    """Return the range of a node in the pack, its positions in its samples, and its name."""
    first, last = node["positions"]
    return f"[{node['start']:>6}, {node['end']:>6})  positions {first}-{last}  {_node_name(node)}"


def _node_name(node: Figures) -> str:
    """Describe a shared prefix, or the tokens that a sample adds to it."""
    first, last = node["positions"]
    num_tokens = last - first + 1
    if "samples" in node:
        num_samples = len(node["samples"])
        return f"prefix of {num_samples} samples, {num_tokens:,} tokens instead of {num_samples * num_tokens:,}"
    name = f"sample {node['sample']}: {escape_line(node['source'])}, row {node['row']}"
    if node["part"]:
        name += f", {node['part']}"
    if node["prefix"] is not None:
        name += f", adds {num_tokens:,} of its {last + 1:,} tokens"
    return name


def _node_details(node: Figures) -> str:
    """Return the trained ranges and the media of a node; "" if it has neither."""
    details = list(node["media"])
    if node["trained"]:
        ranges = " ".join(f"{start}-{end - 1}" if end - start > 1 else f"{start}" for start, end in node["trained"])
        details.insert(0, f"trained {ranges}")
    return "   ".join(details)
