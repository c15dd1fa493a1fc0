"""What to say of an export that dropped every row: the commonest reason, and what mends it."""

from __future__ import annotations

from packtool.cache.manifest import Manifest
from packtool.errors import DataError
from packtool.rows.rights import ALLOWED_BY, NOT_ALLOWED

_REMEDIES = {
    NOT_ALLOWED: f"{ALLOWED_BY[0].upper()}{ALLOWED_BY[1:]}.",
    "media_missing": "The files that the rows name are not where they were looked for: give the folder that their "
    "paths begin in with --media-root.",
    "media_secret": "Addresses with a password or a signature are not kept: export with --media embed.",
    "media_unsupported": "Take a model that reads such media, or rows without them.",
    "media_over_limit": "Give a larger --max-length, smaller pictures with --max-pixels, or --media-overflow.",
    "over_max_length": "Give a larger --max-length, or shorten rows with --truncation-strategy.",
    "no_target_tokens": "Nothing of the rows would be trained: look at --loss-scale, at the roles of the turns, and at "
    "what --truncation-strategy cut off.",
    "turns_not_found": "The chat template writes the turns so that they cannot be found again: give another model or "
    "template.",
    "unknown_form": "Say which columns hold what with --columns, as in --columns messages=dialog.",
    "unknown_role": "Say how the rows name their roles in --dataset-info.",
    "invalid_json": "Is it a .jsonl file, with one JSON object a line?",
    "null_field": "Say which columns hold what with --columns, as in --columns messages=dialog.",
}
_MARKS = (
    "The texts have more or fewer marks (<image>, <video>, <audio>) than the rows have media: look at their columns."
)


def nothing_left(manifest: Manifest, where: str) -> DataError:
    """The error.

    Args:
        where: says where each row's reason is kept.
    """
    common = sorted(manifest.dropped.items(), key=lambda item: -item[1])
    told = ", ".join(f"{count:,} {reason}" for reason, count in common)
    reason = common[0][0] if common else ""
    remedy = _REMEDIES.get(reason, _MARKS if reason.endswith("_marks") else "")
    return DataError(f"none of {manifest.rows:,} rows is left: {told}", f"{remedy} {where}".strip())
