"""Notes on rows that another tool has tokenized: their likely origin, the columns that are used, and open questions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
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
_NOT_VOUCHED = (
    "nobody vouches for these tokens: no row says which tokenizer, chat template and truncation made it, and --model "
    "is taken to be the model that they were made for"
)


def prepared_notes(scanned: Sequence[ScannedSource], takes_tokens: bool) -> list[str]:
    """Return notes on sources, a line each; sources with the same note share a line.

    Args:
        takes_tokens: add a note on rows without tokens, which ``packtool import`` does not expect.
    """
    labels: dict[str, list[str]] = {}
    for item in scanned:
        source = item.source
        if source.form == PREPARED.name:
            labels.setdefault(_description(source, item.blocks), []).append(source.label)
        elif takes_tokens and source.form is not None:
            text = (
                f"rows ({source.form}) without tokens, as ms-swift's cached datasets are; they are tokenized "
                "now, as packtool export does"
            )
            labels.setdefault(text, []).append(source.label)
    notes = [
        f"{first}: {text}" if not others else f"{first} and {len(others):,} more: {text}"
        for text, (first, *others) in labels.items()
    ]
    has_tokens = any(item.source.form == PREPARED.name for item in scanned)
    return [*notes, _NOT_VOUCHED] if has_tokens else notes


def _description(source: Source, blocks: Iterable[RowBlock]) -> str:
    rows = [row for block in islice(blocks, 1) for _, row in read_block(source, block) if isinstance(row, dict)]
    samples: list[Sample] = []
    for row in rows:
        try:
            with suppress(RowProblem):
                samples.append(to_sample(row, source, 0))
        except BaseException as error:
            unexpected_drop("", 0, error)  # raises errors that are not the row's
    keys = {key for row in rows for key in row}
    columns = dict(source.columns)
    names = {name: (columns[name],) if name in columns else NAMES[name] for name in TOKEN_COLUMNS}
    used = [name for name in TOKEN_COLUMNS if keys.intersection(names[name])]
    used += [kind for kind in ("images", "videos", "audios") if any(getattr(sample, kind) for sample in samples)]
    parts = [f"tokens{_origin(source, keys)}", f"taken over: {', '.join(used) or 'nothing'}"]
    if samples and all(sample.is_text for sample in samples):
        parts.append("no labels, so every token is a target, as in pretraining")
    max_samples = max((len(sample.tokens.starts) for sample in samples if sample.tokens is not None), default=1)
    if max_samples > 1:
        parts.append(f"packs are taken apart (up to {max_samples:,} samples a row)")
    elif source.kind != "megatron" and not _BOUNDARIES & set(used):
        parts.append("each row is one sample, for nothing says otherwise")
    return "; ".join(parts)


def _origin(source: Source, keys: set[str]) -> str:
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
