"""Remedies for dropped rows, by reason, and the messages about them: at the end of an export, and if none is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packtool.cache.manifest import Manifest
from packtool.cache.task import TaskResult
from packtool.constants import MEDIA_MARKS
from packtool.errors import DataError
from packtool.rows.rights import ALLOWED_BY, NOT_ALLOWED

REMEDIES = {
    NOT_ALLOWED: f"{ALLOWED_BY[0].upper()}{ALLOWED_BY[1:]}.",
    "media_missing": "The files that the rows name are not where they were looked for: give the folder that their "
    "paths begin in with --media-root.",
    "media_secret": "Addresses with a password or a signature are not kept: export with --media embed.",
    "media_unsupported": "Take a model that reads such media, or rows without them.",
    "media_over_limit": "Give a larger --max-length, smaller pictures with --max-pixels, or --media-overflow.",
    "over_max_length": "Give a larger --max-length, or shorten rows with --truncation-strategy.",
    "no_target_tokens": "No token of the rows would be trained. --truncation-strategy right cuts off the answers "
    "behind long questions: take left, or a larger --max-length. Else check --loss-scale and the roles of the turns.",
    "turns_not_found": "The chat template writes the turns so that they cannot be found again: give another model or "
    "template.",
    "media_unreadable": "The files are there, and are not what the rows say: look at one of them.",
    "media_size": "Their files are larger than --max-media-bytes, or the model cannot be shown media or clips of "
    "such a size.",
    "media_limits": "Leave out what rows say of the size of their media, but for min_pixels, max_pixels and the others "
    "that docs/media.md names.",
    "media_refused": "Their store refuses them: check the credentials, and whether the addresses are still good.",
    "media_unreachable": "Their store does not answer: check the network and the addresses.",
    "over_max_row_bytes": "Give a larger --max-row-bytes, as in --max-row-bytes 256MB.",
    "cannot_be_split": "Take another --truncation-strategy: split is for plain text.",
    "duplicate_keys": "Write each key of an object once: JSON readers do not agree on which of two counts.",
    "invalid_text": "Save the file as UTF-8, and mend what was cut through in the middle of a character.",
    "invalid_content": "Turns must say text: NaN, Infinity and parts of unknown kinds are no text.",
    "empty_conversation": "The rows hold no turns: say which column does with --columns, as in "
    "--columns messages=dialog.",
    "turn_left_out": "The chat template does not write all turns, as some write only the first system prompt: join "
    "them in the rows, or give another template with --chat-template FILE.",
    "template_refused": "The chat template does not take such conversations: mend the rows, or give another template "
    "with --chat-template FILE.",
    "no_chat_template": "Give a template with --chat-template FILE, or take the instruct model.",
    "role_order": "Conversations begin with a turn of the user, behind the system prompt.",
    "unknown_form": "Say which columns hold what with --columns, as in --columns messages=dialog.",
    "unknown_role": "Say how the rows name their roles in --dataset-info.",
    "token_out_of_range": "Give the --model whose tokenizer made the tokens.",
    "media_tokens": "Give the limits on media (--max-pixels, ...) and the model that the rows were prepared with.",
    "media_changed": "Give the limits on media (--max-pixels, --fps, ...) that the rows were prepared with, and the "
    "same files.",
    "unknown_boundaries": "Packs must say where their samples begin: leave out the columns that do not, or import the "
    "samples before they were packed.",
    "unknown_loss_mask": "Name the mask: --columns completion_mask=loss_mask if it stands at the target itself.",
    "labels_shifted": "Shift them back: a label stands at its own token, and the loss shifts.",
    "labels_differ": "Labels are the token itself or -100: packtool trains no other targets.",
    "labels_given": "Leave --loss-scale's rules out: rules look at text, and these rows are tokens.",
    "invalid_tokens": "The columns of such rows are lists of integers, as many of each as there are tokens.",
    "invalid_json": "Is it a .jsonl file, with one JSON object a line?",
    "null_field": "Say which columns hold what with --columns, as in --columns messages=dialog.",
    "object_marks": "The texts have more or fewer <bbox> and <ref-object> than 'objects' has. If they are plain text, "
    "add --columns objects= to say so.",
    "object_image": "Give 'image_id' the number of a picture in the row, from 0 on.",
    "objects_unsupported": "Take a model whose boxes docs/rows.md describes, or write them into the texts yourself.",
    "box_outside": "Check 'bbox_type' (real, norm1 or norm1000), and that 'objects' fits the pictures' present sizes.",
    "invalid_objects": "Write 'objects' as docs/rows.md describes it.",
    "invalid_media": "Give each medium as a path, a URL, a data URI, base64 text or {bytes, path}.",
    "invalid_row": "Give the columns values of the types that docs/rows.md describes.",
    "invalid_tool_call": "Write tool calls as {name, arguments}.",
    "invalid_csv": "Give each record as many fields as the header has, and quote fields that hold separators.",
    "empty_text": "Leave out rows without text.",
    "empty_tokens": "Leave out rows without tokens, or check 'attention_mask'.",
    "private_characters": "Remove characters of Unicode's planes 15 and 16 from the texts.",
    "media_budget": "Give a larger --max-media-tokens-per-pack, or smaller pictures with --max-pixels.",
    **{
        f"{kind}_marks": f"The texts have more or fewer {mark} marks than the rows have {kind}s. If a column holds "
        f"them, name it, as in --columns {kind}s=NAME; if {mark} is plain text, add --columns {kind}s= to say so."
        for kind, mark in MEDIA_MARKS.items()
    },
}
"""Remedies for the reasons in ``dropped.jsonl``, except ``unexpected``."""
_MAX_SHARE, _MAX_REMEDIES = 0.25, 3


def drop_notes(dropped: Mapping[str, int], num_rows: int | None = None) -> list[str]:
    """Lines about dropped rows: a warning if they are many, and remedies for the most common reasons.

    Args:
        dropped: rows by reason.
        num_rows: rows that were read, None if it is not known.
    """
    num_dropped = sum(dropped.values())
    notes = []
    if num_rows and num_dropped > _MAX_SHARE * num_rows:
        notes.append(f"warning: {num_dropped:,} of {num_rows:,} rows ({num_dropped / num_rows:.0%}) were dropped")
    common = sorted((-count, reason) for reason, count in dropped.items() if reason in REMEDIES)[:_MAX_REMEDIES]
    return notes + [f"{reason} ({-count:,}): {REMEDIES[reason]}" for count, reason in common]


def nothing_left(manifest: Manifest, results: Sequence[TaskResult], where: str) -> DataError:
    """The error of an export.

    Args:
        where: says where each row's reason is kept.
    """
    firsts: dict[str, str] = {}
    for result in results:
        firsts = result.first_dropped | firsts
    return all_dropped(f"none of {manifest.rows:,} rows is left", manifest.dropped, firsts, where)


def all_dropped(what: str, dropped: Mapping[str, int], firsts: Mapping[str, str], where: str) -> DataError:
    """The error of whoever reads rows and keeps none.

    Args:
        what: happened, in a few words.
        dropped: rows by reason.
        firsts: the first row of each reason, and what is wrong with it; that of the commonest stands for all.
        where: says where each row's reason is kept.
    """
    common = sorted(dropped.items(), key=lambda item: -item[1])
    told = ", ".join(f"{count:,} {reason}" for reason, count in common)
    reason = common[0][0] if common else ""
    remedy = REMEDIES.get(reason, "")
    first = f"\nThe first: {firsts[reason]}" if reason in firsts else ""
    return DataError(f"{what}: {told or 'there were none'}{first}", f"{remedy} {where}".strip())
