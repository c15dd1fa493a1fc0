"""Messages about rows that another tool has tokenized: their likely origin, and how packtool reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.forms.columns import NAMES, TOKEN_COLUMNS
from packtool.rows.forms.prepared import PREPARED
from packtool.rows.read import read_block
from packtool.rows.sample import Sample, unexpected_drop
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
    """Describe how sources of tokenized rows are read, one line per description; others too if ``takes_tokens``."""
    labels: dict[str, list[str]] = {}  # of the sources, by their description
    for item in scanned:
        source = item.source
        if source.form == PREPARED.name:
            labels.setdefault(_description(source, item.blocks), []).append(source.label)
        elif takes_tokens and source.form is not None:
            text = (
                f"rows without tokens (form {source.form}), as in ms-swift's cached datasets; they are tokenized now, "
                "as by packtool export"
            )
            labels.setdefault(text, []).append(source.label)
    notes = []
    for text, (first, *others) in labels.items():
        more = f" and {len(others):,} more" if others else ""
        notes.append(f"{first}{more}: {text}")
    has_tokens = any(item.source.form == PREPARED.name for item in scanned)
    return [*notes, _UNCHECKED_TOKENS] if has_tokens else notes


def _description(source: Source, blocks: Iterable[RowBlock]) -> str:
    rows = [row for block in islice(blocks, 1) for _, row in read_block(source, block) if isinstance(row, dict)]
    samples: list[Sample] = []
    for row in rows:
        try:
            samples.append(to_sample(row, source, 0))
        except RowProblem:
            continue
        except BaseException as error:
            unexpected_drop("", 0, error)  # raises it if the row is not the cause
    keys = {key for row in rows for key in row}
    columns = dict(source.columns)
    names = {name: (columns[name],) if name in columns else NAMES[name] for name in TOKEN_COLUMNS}
    used_columns = [name for name in TOKEN_COLUMNS if keys.intersection(names[name])]
    for name in ("images", "videos", "audios"):
        if any(getattr(sample, name) for sample in samples):
            used_columns.append(name)
    statements = [f"tokens{_origin(source, keys)}", f"used columns: {', '.join(used_columns) or 'none'}"]
    if samples and all(sample.is_text for sample in samples):
        statements.append("no labels, so every token is a target, as in pretraining")
    max_samples = max((len(sample.tokens.starts) for sample in samples if sample.tokens is not None), default=1)
    if max_samples > 1:
        statements.append(f"packs are split into samples (up to {max_samples:,} per row)")
    elif source.kind != "megatron" and not _BOUNDARIES & set(used_columns):
        statements.append("each row is one sample, because no column has sample boundaries")
    return "; ".join(statements)


def _origin(source: Source, keys: set[str]) -> str:
    """Return a phrase with the tool that probably wrote the rows, by their column names; "" if unknown."""
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
