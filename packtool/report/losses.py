"""Output of ``packtool inspect --losses``: samples of a run whose losses are unusual.

A sample's first and last loss are those of the first and last epoch that trained it. Groups of samples:

    highest         the 5 % with the highest last loss: wrong labels, another language, truncated answers
    not_improved    the last loss is not below the first one; only samples that were trained in several epochs
    near_zero       the first loss is below 0.1 nats per token: memorized before, duplicates, or trivial
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.evaluation_file import plain_json
from packtool.cache.origins import read_origins
from packtool.cache.reader import CacheReader
from packtool.cache.shard import num_targets
from packtool.config.data import EncodeSpec, ExportConfig
from packtool.config.train import TrainConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder, encode_samples
from packtool.encode.model_files import ModelFiles
from packtool.errors import DataError, MismatchError
from packtool.planning.pack_plan import Int64Array
from packtool.report.drawing import plural
from packtool.report.inspect import Decoder
from packtool.report.tables import Figures, aligned
from packtool.rows.read import follow, samples_of
from packtool.rows.sample import Dropped, RowPart
from packtool.rows.source import BLOCK_ROWS, Source, SourceSpec
from packtool.rows.sources import sources_of
from packtool.terminal import escape_line
from packtool.train.prepare.checkpoint import finished_checkpoints, read_options, run_directory
from packtool.train.prepare.from_rows import length_of_rows
from packtool.train.prepare.history import has_history, read_history, train_config_of
from packtool.train.prepare.output_dir import HISTORY
from packtool.train.prepare.sample_losses import losses_by_epoch, stream_losses

GROUPS = {"highest": "highest loss", "not_improved": "did not improve", "near_zero": "near zero from the start"}
"""Titles of the groups, by their names in JSON."""
_SHARE_OF_HIGHEST, _NEAR_ZERO, _MAX_LISTED = 0.05, 0.1, 20


class RunLosses:
    """Losses of the N samples of a run; ``directory`` is its output directory or a checkpoint.

    Attributes:
        reader: of the caches; None for a stream, whose table ``stream`` names the row of each sample.
        losses: by 1-based epoch, (N,) each; NaN for samples that the epoch did not train.
        first, last: loss of each sample when first and last trained, (N,); NaN for samples that were never trained.
        groups: positions of the samples of each group, the most unusual first.
    """

    def __init__(self, directory: str) -> None:
        """Read the losses; raise a MismatchError if the run has kept none."""
        self.run = run_directory(directory)
        self.reader: CacheReader | None = None
        self.losses: dict[int, npt.NDArray[np.float32]] = {}
        history = os.path.join(self.run, HISTORY)
        stream_table = stream_losses(history)  # None for a run on caches
        if stream_table is not None:
            self.losses, self.stream = _of_stream(stream_table)
        elif has_history(self.run):
            newest_segment = read_history(self.run)[-1]  # the steps since the last start or resume
            directories = dict.fromkeys(cache for cache, _, _ in newest_segment.caches)  # each once, in order
            self.reader = CacheReader.open([*directories])
            self.losses = _of_caches(self.reader, history)

        self.first, self.last = _first_and_last([*self.losses.values()])
        if np.isnan(self.last).all():
            raise MismatchError(
                f"{self.run} has no losses of its samples",
                "They are written with the first checkpoint, unless --sample-losses is false, for unchanged caches.",
            )
        self.groups = dict(zip(GROUPS, self._groups(), strict=True))

    def _groups(self) -> Iterator[Int64Array]:
        """Yield the positions of the samples of each group, in the order of ``GROUPS``."""
        yield _descending(self.last)[: max(round(_SHARE_OF_HIGHEST * np.isfinite(self.last).sum()), 1)]
        num_epochs = np.sum([np.isfinite(losses) for losses in self.losses.values()], axis=0)
        rise = self.last - self.first
        yield _descending(np.where((num_epochs > 1) & (rise >= 0), rise, np.nan))
        yield _descending(np.where(self.first < _NEAR_ZERO, -self.first, np.nan))

    @cached_property
    def columns(self) -> dict[str, list[Any]]:
        """The columns of ``--export-losses``, by name: lists of N values."""
        losses = {f"loss_{epoch}": losses.tolist() for epoch, losses in self.losses.items()}
        if self.reader is None:
            return {**self.stream.to_pydict(), **losses}
        index = self.reader.index
        columns = _origin_columns(self.reader)
        columns["channel"] = [index.channels[number] if number >= 0 else None for number in index.channel]
        columns |= {"tokens": index.length.tolist(), "target_tokens": index.target_tokens.tolist()}
        return columns | losses

    def figures(self) -> dict[str, Any]:
        """Return the output of ``packtool inspect --losses --json``; NaN is null."""
        max_lengths = [1 << (length - 1).bit_length() for length in self.columns["tokens"]]
        by_kind = {"by_source": self._counts(self.columns["source"]), "by_length": self._counts(max_lengths)}
        groups = {}
        for name, positions in self.groups.items():
            listed = positions[:_MAX_LISTED].tolist()
            samples = [{column: values[position] for column, values in self.columns.items()} for position in listed]
            groups[name] = {"num_samples": len(positions), "samples": samples}
        return dict(plain_json({"run": self.run, "epochs": [*self.losses], **by_kind, "groups": groups}))

    def _counts(self, kinds: Sequence[str] | Sequence[int]) -> list[dict[str, Any]]:
        """Return mean losses, and numbers of samples in each group, for each of the ``kinds`` (N,) of samples."""
        names, kind_of_sample = np.unique(np.array(kinds, object), return_inverse=True)
        count = partial(np.bincount, minlength=len(names))
        columns: dict[str, npt.NDArray[Any]] = {"num_samples": count(kind_of_sample[np.isfinite(self.last)])}
        for epoch, losses in self.losses.items():
            trained, kind_of_trained = np.isfinite(losses), kind_of_sample[np.isfinite(losses)]
            with np.errstate(invalid="ignore"):
                columns[f"loss_{epoch}"] = count(kind_of_trained, losses[trained]) / count(kind_of_trained)
        columns |= {group: count(kind_of_sample[positions]) for group, positions in self.groups.items()}
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        return [{"name": name, **dict(zip(columns, row, strict=True))} for name, row in zip(names, rows, strict=True)]


def _of_caches(reader: CacheReader, history: str) -> dict[int, npt.NDArray[np.float32]]:
    """Return the losses of the N samples of all caches by 1-based epoch, (N,) each, from the history of their run."""
    sizes = [*zip(reader.manifests, np.diff(reader.offsets), strict=True)]
    losses = {}
    for epoch_index, losses_of_caches in losses_by_epoch(history).items():
        columns = [losses_of_caches.get(cache.fingerprint, np.full(size, np.nan)) for cache, size in sizes]
        losses[epoch_index + 1] = np.concatenate(columns).astype(np.float32)
    return losses


def _first_and_last(epochs: Sequence[npt.NDArray[np.float32]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the first and the last loss of each sample, (N,), from the losses of each epoch; NaN if never trained."""
    first = last = np.full_like(epochs[0], np.nan) if epochs else np.empty(0, np.float32)
    for losses in epochs:
        first = np.where(np.isnan(first), losses, first)
        last = np.where(np.isnan(losses), last, losses)
    return first, last


def _origin_columns(reader: CacheReader) -> dict[str, list[Any]]:
    """Return cache, number in the cache, file, row and part of the samples of all caches, as columns by name."""
    columns: dict[str, list[Any]] = {name: [] for name in ("cache", "sample", "source", "row", "part")}
    for cache, directory in enumerate(reader.directories):
        origins = read_origins(reader, cache)
        num_samples = len(origins.row)
        parts = np.zeros((num_samples, 4), np.int32) if origins.part is None else origins.part
        columns["cache"] += [directory] * num_samples
        columns["sample"] += range(num_samples)
        columns["source"] += [origins.files[number] for number in origins.file]
        columns["row"] += origins.row.tolist()
        columns["part"] += [vars(RowPart(*part)) if any(part) else None for part in parts.tolist()]
    return columns


def _of_stream(table: Any) -> tuple[dict[int, npt.NDArray[np.float32]], Any]:
    """Return losses by 1-based epoch, (N,) each, and a table, of the N samples in the table of ``stream_losses``."""
    sources = table["source"].combine_chunks().dictionary_encode().indices
    keys = np.stack([column.to_numpy() for column in (sources, table["row"], table["sample"])])
    is_first = np.append(True, np.diff(keys).any(axis=0))
    sample, epochs = np.cumsum(is_first) - 1, table["epoch"].to_numpy()
    losses = {int(epoch) + 1: np.full(is_first.sum(), np.nan, np.float32) for epoch in np.unique(epochs)}
    for epoch, values in losses.items():
        in_epoch = epochs == epoch - 1
        values[sample[in_epoch]] = table["loss"].to_numpy()[in_epoch]  # the last step counts
    names = ["sample", "source", "row", "part", "channel", "tokens", "target_tokens"]
    return losses, table.select(names).filter(is_first)


def encode_rows(
    losses: RunLosses, numbers: Int64Array, model: str | None
) -> tuple[Decoder, dict[int, EncodedSample], list[str]]:
    """Encode samples of a streamed run again from their rows, because a stream keeps no tokens.

    Args:
        numbers: positions of the samples in ``losses``, (S,).
        model: present directory of the model if it has moved.

    Returns:
        Their decoder; the samples by number, without those that no longer have as many tokens as when trained; and
        messages on files that cannot be read.
    """
    key_columns = ["source", "row", "sample", "tokens", "target_tokens"]
    rows = losses.stream.select(key_columns).take(numbers).to_pylist()
    keys = [tuple(row.values()) for row in rows]
    number_by_key = dict(zip(keys, numbers.tolist(), strict=True))

    config = _config_of(losses.run, model)
    files = ModelFiles.load(config.model, config.chat_template, config.chat_template_kwargs)
    max_length = length_of_rows(config, files)
    export_config = config.export_config(output_dir="", max_length=max_length)
    encode_spec = export_config.encode_spec
    encoder = Encoder(_dropping_long_rows(encode_spec), files)

    problems: list[str] = []
    row_files = _find_files(export_config, problems)
    samples = _encode_files(row_files, number_by_key, encoder, problems)
    return Decoder(files, encode_spec.recorded(), encoder.limits), samples, problems


def _dropping_long_rows(spec: EncodeSpec) -> EncodeSpec:
    """Return settings that leave out rows that have become too long, instead of raising an error."""
    if spec.truncation_strategy == "raise":
        spec = dataclasses.replace(spec, truncation_strategy="delete")
    if spec.media_overflow == "raise":
        spec = dataclasses.replace(spec, media_overflow="drop")
    return spec


def _encode_files(
    specs: Iterable[SourceSpec], number_by_key: dict[tuple[Any, ...], int], encoder: Encoder, problems: list[str]
) -> dict[int, EncodedSample]:
    """Encode the samples with these keys from files of rows; return them by number, in ascending order.

    A key is file, row, number in the row, tokens and targets. A sample whose row gives other numbers today is left out.
    Files without such samples are not opened; ``problems`` gets a message on each file that cannot be read.
    """
    samples: dict[int, EncodedSample] = {}
    for spec in specs:
        label = Source(spec.path).label
        row_numbers = {row for name, row, *_ in number_by_key if name == label}
        if not row_numbers:
            continue
        try:
            for number_in_row, sample in _encode_file(spec, row_numbers, encoder):
                key = label, sample.row, number_in_row, sample.length, num_targets(sample)
                if key in number_by_key:
                    samples[number_by_key[key]] = sample
        except DataError as error:
            problems.append(error.message)
    return dict(sorted(samples.items()))


def _config_of(run: str, model: str | None) -> TrainConfig:
    """Return the options of a run in its newest checkpoint, with another ``model`` unless it is None."""
    options = next((read_options(checkpoint) for checkpoint in finished_checkpoints(run)[-1:]), None)
    if options is None:
        problem = f"{run} has no checkpoint with the options of the run, so rows cannot be encoded again"
        raise MismatchError(problem, "--losses alone, or --export-losses FILE, names file and row of each sample.")
    return train_config_of(options | ({"model": model} if model else {}), "of another version")


def _find_files(config: ExportConfig, problems: list[str]) -> Iterator[SourceSpec]:
    """Yield the files of ``--dataset``; ``problems`` gets a message on each argument whose files no longer exist."""
    for name in config.dataset:
        try:
            yield from sources_of(dataclasses.replace(config, dataset=(name,), val_dataset=()))
        except DataError as error:
            is_absolute = os.path.isabs(name) or storage.is_remote(name)
            problems.append(error.message + ("" if is_absolute else f" (relative paths start in {os.getcwd()})"))


def _encode_file(spec: SourceSpec, rows: set[int], encoder: Encoder) -> Iterator[tuple[int, EncodedSample]]:
    """Yield the samples of these rows of a file, with their numbers in the row."""
    source, blocks = follow(spec)
    for block in blocks:
        if not rows.isdisjoint(range(block.first_row, block.first_row + BLOCK_ROWS)):
            samples = samples_of(source, [block], may_hold_secrets=False)
            for result in encode_samples([sample for sample in samples if sample.row in rows], encoder):
                yield from () if isinstance(result, Dropped) else enumerate(result)


def _descending(values: npt.NDArray[np.float32]) -> Int64Array:
    """Return the positions of values, the largest first, without NaN."""
    return np.argsort(-values, kind="stable")[: int((~np.isnan(values)).sum())]


def losses_lines(figures: Figures) -> Iterator[str]:
    """Yield the output of ``packtool inspect --losses`` for a result of ``RunLosses.figures``."""
    losses = [f"loss_{epoch}" for epoch in figures["epochs"]]
    for name, title in {"by_source": "source", "by_length": "up to tokens"}.items():
        rows = [(title, "samples", *(name.replace("loss_", "epoch ") for name in losses), *GROUPS.values())]
        for kind in figures[name]:
            counts = [f"{kind[group]:,}" for group in GROUPS]
            means = [_number(kind[column]) for column in losses]
            rows.append((str(kind["name"]), f"{kind['num_samples']:,}", *means, *counts))
        yield from [*aligned(rows), ""]
    for name, title in GROUPS.items():
        group = figures["groups"][name]
        shown = f", the first {_MAX_LISTED}" if group["num_samples"] > _MAX_LISTED else ""
        yield f"{title}: {plural(group['num_samples'], 'sample')}{shown}"
        yield from [*aligned([_sample_row(sample, losses) for sample in group["samples"]], "lrl"), ""]
    yield f"pages with their media: packtool inspect {escape_line(figures['run'])} --losses --html DIR"


def _sample_row(sample: Figures, losses: Sequence[str]) -> tuple[str, ...]:
    """Return the table row of a sample; ``losses`` are the names of its losses, one for each epoch."""
    part = f", {RowPart(**sample['part'])}" if sample["part"] else ""
    name = f"{sample['cache']} --row {sample['sample']}" if "cache" in sample else f"sample {sample['sample']} of"
    origin = name, f"row {sample['row']} of {sample['source']}{part}"
    return " → ".join(_number(sample[name]) for name in losses), f"{sample['tokens']:,} tokens", *origin


def _number(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"
