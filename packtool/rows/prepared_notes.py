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
    """Describe how sources of tokenized rows are read, with one line for all sources with the same description.

    With ``takes_tokens`` (``packtool import``), other sources are described, too.
    """
    labels_by_description: dict[str, list[str]] = {}
    for item in scanned:
        source = item.source
        if source.form == PREPARED.name:
            description = _describe_tokens(source, item.blocks)
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
        more = f" and {len(other_labels):,} more" if other_labels else ""
        notes.append(f"{first_label}{more}: {description}")
    if any(item.source.form == PREPARED.name for item in scanned):
        notes.append(_UNCHECKED_TOKENS)
    return notes


def _describe_tokens(source: Source, blocks: Iterable[RowBlock]) -> str:
    """Describe the tokenized rows of a source by the first of its blocks: their origin, used columns and packs."""
    first_blocks = list(islice(blocks, 1))
    rows = (row for block in first_blocks for _, row in read_block(source, block))
    keys = {key for row in rows if isinstance(row, dict) for key in row}
    samples = first_samples(source, first_blocks)
    used_columns = _used_columns(source, keys, samples)
    statements = [f"tokens{_origin(source, keys)}", f"used columns: {', '.join(used_columns) or 'none'}"]
    if samples and all(sample.is_text for sample in samples):  # ``is_text`` of tokenized rows: they have no labels
        statements.append("no labels, so every token is a target, as in pretraining")
    samples_per_row = [len(sample.tokens.starts) for sample in samples if sample.tokens is not None]
    max_samples = max(samples_per_row, default=1)
    if max_samples > 1:
        statements.append(f"packs are split into samples (up to {max_samples:,} per row)")
    elif source.kind != "megatron" and not _BOUNDARIES & set(used_columns):
        statements.append("each row is one sample, because no column has sample boundaries")
    return "; ".join(statements)


def _used_columns(source: Source, keys: set[str], samples: Sequence[Sample]) -> list[str]:
    """Return packtool's names of the token and media columns that the rows have; ``keys``: the rows' own names."""
    named_columns = dict(source.columns)
    used_columns = []
    for name in TOKEN_COLUMNS:
        file_names = [named_columns[name]] if name in named_columns else NAMES[name]
        if keys.intersection(file_names):
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
