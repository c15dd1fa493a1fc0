"""What is said of rows that another tool has tokenized: what they look like, what is taken over, what nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.forms.columns import NAMES, TOKEN_COLUMNS
from packtool.rows.forms.prepared import PREPARED
from packtool.rows.read import read_block
from packtool.rows.sample import Sample, held
from packtool.rows.source import RowBlock, ScannedSource, Source

_LLAMA_FACTORY = {"input_ids", "attention_mask", "labels", "images", "videos", "audios"}
_AXOLOTL = {"input_ids", "attention_mask", "labels", "position_ids"}
_TRL = {"completion_mask", "assistant_masks", "seq_lengths"}
_BOUNDARIES = {"seq_lengths", "cu_seqlens", "seq_start_id", "position_ids"}
_NOT_VOUCHED = (
    "nobody vouches for these tokens: no row says which tokenizer, chat template and truncation made it, and --model "
    "is taken to be the model that they were made for"
)


def prepared_notes(scanned: Sequence[ScannedSource], takes_tokens: bool) -> list[str]:
    """What is to be said of sources before the work begins, a line each; sources of which the same is said share one.

    Args:
        takes_tokens: rows without tokens are spoken of, too: who imports expects none.
    """
    found: dict[str, list[str]] = {}
    for source in scanned:
        if source.source.form == PREPARED.name:
            found.setdefault(_of_tokens(source.source, source.blocks), []).append(source.source.label)
        elif takes_tokens and source.source.form is not None:
            text = (
                f"rows ({source.source.form}) without tokens, as ms-swift's cached datasets are; they are tokenized "
                "now, as packtool export does"
            )
            found.setdefault(text, []).append(source.source.label)
    notes = [f"{_named(labels)}: {text}" for text, labels in found.items()]
    has_tokens = any(source.source.form == PREPARED.name for source in scanned)
    return [*notes, _NOT_VOUCHED] if has_tokens else notes


def _named(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1:,} more"


def _of_tokens(source: Source, blocks: Iterable[RowBlock]) -> str:
    rows = [row for block in islice(blocks, 1) for _, row in read_block(source, block) if isinstance(row, dict)]
    samples = [item for row in rows if isinstance(item := held("", 0, _sample, row, source), Sample)]
    keys = {key for row in rows for key in row}
    given = dict(source.columns)
    names = {name: (given[name],) if name in given else NAMES[name] for name in TOKEN_COLUMNS}
    taken = [name for name in TOKEN_COLUMNS if keys.intersection(names[name])]
    taken += [kind for kind in ("images", "videos", "audios") if any(getattr(sample, kind) for sample in samples)]
    parts = [f"tokens{_look(source, keys)}", f"taken over: {', '.join(taken) or 'nothing'}"]
    if samples and all(sample.is_text for sample in samples):
        parts.append("no labels, so every token is a target, as in pretraining")
    most = max((len(sample.tokens.starts) for sample in samples if sample.tokens is not None), default=1)
    if most > 1:
        parts.append(f"packs are taken apart (up to {most:,} samples a row)")
    elif source.kind != "megatron" and not _BOUNDARIES & set(taken):
        parts.append("each row is one sample, for nothing says otherwise")
    return "; ".join(parts)


def _sample(row: Mapping[str, Any], source: Source) -> Sample | None:
    try:
        return to_sample(row, source, 0)
    except RowProblem:
        return None


def _look(source: Source, keys: set[str]) -> str:
    if source.kind == "megatron":
        return " of Megatron's indexed datasets, a document each"
    if {"sample", "cu_seqlens", "position_ids"} <= keys:
        return ", as packtool pack writes them"
    if {"seq_start_id", "loss_mask"} <= keys:
        return ", as NeMo and Megatron Bridge pack them"
    if keys & _TRL:
        return ", as TRL prepares them"
    if keys >= _LLAMA_FACTORY:
        return ", as LLaMA-Factory's tokenized_path has them"
    return ", as axolotl prepares them" if keys >= _AXOLOTL else ""
