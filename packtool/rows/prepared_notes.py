"""Messages about rows that another tool has tokenized: their likely origin, and how packtool reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from packtool.rows.forms.columns import NAMES, TOKEN_COLUMNS
from packtool.rows.forms.prepared import PREPARED
from packtool.rows.read import first_samples, read_block
from packtool.rows.sample import Sample
from packtool.rows.source import RowBlock, ScannedSource, Source

_LLAMA_FACTORY = {"input_ids", "attention_mask", "labels", "images", "videos", "audios"}
_AXOLOTL = {"input_ids", "attention_mask", "labels", "position_ids"}
_TRL = {"completion_mask", "assistant_masks", "seq_lengths"}
_BOUNDARIES = {"seq_lengths", "cu_seqlens", "seq_start_id", "position_ids"}
_UNCHECKED_TOKENS = (
    "the tokens cannot be checked: rows do not record their tokenizer, chat template and truncation; make sure that "
    "--model is the model for which they were tokenized"
)


def prepared_notes(scanned: Sequence[ScannedSource], takes_tokens: bool) -> list[str]:
    """Describe how files of tokenized rows are read: one line for all files with the same description.

    Files of other rows are described only with ``takes_tokens``, which ``packtool import`` sets, because its user
    expects tokens. The last line warns that the tokens cannot be checked.
    """
    labels_by_description: dict[str, list[str]] = {}
    for scanned_source in scanned:
        source = scanned_source.source
        has_tokens = source.form == PREPARED.name
        if has_tokens:
            description = _describe_tokens(source, scanned_source.blocks)
        elif takes_tokens and source.form is not None:
            description = (
                f"rows without tokens (form {source.form}), as in ms-swift's cached datasets; they are tokenized now, "
                "as by packtool export"
            )
        else:
            continue
        labels_by_description.setdefault(description, []).append(source.label)

    notes = []
    for description, (first_label, *other_labels) in labels_by_description.items():
        num_others = f" and {len(other_labels):,} more" if other_labels else ""
        notes.append(f"{first_label}{num_others}: {description}")
    if any(scanned_source.source.form == PREPARED.name for scanned_source in scanned):
        notes.append(_UNCHECKED_TOKENS)
    return notes


def _describe_tokens(source: Source, blocks: Iterable[RowBlock]) -> str:
    """Describe the tokenized rows of a file: the tool that wrote them, the columns that are used, labels and packs.

    Only the rows of the first of ``blocks`` are read. A row with several samples is a pack.
    """
    first_blocks = list(islice(blocks, 1))  # [] for a file without rows
    column_names = _names_in_rows(source, first_blocks)
    samples = first_samples(source, first_blocks)
    used_columns = _used_columns(source, column_names, samples)
    statements = [f"tokens{_origin(source, column_names)}", f"used columns: {', '.join(used_columns) or 'none'}"]

    has_no_labels = bool(samples) and all(sample.is_text for sample in samples)  # what ``is_text`` means for tokens
    if has_no_labels:
        statements.append("no labels, so every token is a target, as in pretraining")

    samples_per_row = [len(sample.tokens.starts) for sample in samples if sample.tokens is not None]
    max_samples = max(samples_per_row, default=1)
    has_boundary_column = not _BOUNDARIES.isdisjoint(used_columns)
    if max_samples > 1:
        statements.append(f"packs are split into samples (up to {max_samples:,} per row)")
    elif source.kind != "megatron" and not has_boundary_column:
        statements.append("each row is one sample, because no column has sample boundaries")
    return "; ".join(statements)


def _names_in_rows(source: Source, blocks: Iterable[RowBlock]) -> set[str]:
    """Return the names of all columns that occur in some blocks of rows; rows that cannot be parsed have none."""
    names: set[str] = set()
    for block in blocks:
        for _, row in read_block(source, block):
            if isinstance(row, dict):
                names.update(row)
    return names


def _used_columns(source: Source, names_in_file: set[str], samples: Sequence[Sample]) -> list[str]:
    """Return packtool's names of the columns of tokens in a file, and of the media columns that its samples use."""
    named_columns = dict(source.columns)  # by packtool's name; these replace the usual names
    used_columns = []
    for name in TOKEN_COLUMNS:
        possible_names = [named_columns[name]] if name in named_columns else NAMES[name]
        if names_in_file.intersection(possible_names):
            used_columns.append(name)
    for name in ("images", "videos", "audios"):
        if any(getattr(sample, name) for sample in samples):
            used_columns.append(name)
    return used_columns


def _origin(source: Source, keys: set[str]) -> str:
    """Return a phrase to follow "tokens": the tool that probably wrote the rows, by their columns; "" if unknown."""
    if source.kind == "megatron":
        return " of a Megatron indexed dataset, one document per row"
    if {"sample", "cu_seqlens", "position_ids"} <= keys:
        return " written by packtool pack"
    if {"seq_start_id", "loss_mask"} <= keys:
        return " packed by NeMo or Megatron Bridge"
    if keys & _TRL:
        return " prepared by TRL"
    if keys >= _LLAMA_FACTORY:
        return " from LLaMA-Factory's tokenized_path"
    return " prepared by axolotl" if keys >= _AXOLOTL else ""
