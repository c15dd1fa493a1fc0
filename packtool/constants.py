"""Numbers and names that more than one folder needs."""

from __future__ import annotations

VERSION = "0.1.0"
"""Version of packtool, as ``packtool.__version__`` shows it and every output records it."""

FORMAT_VERSION = 2
"""Version of the cache directory's layout; bumped when an older reader would misread it."""

IGNORE_INDEX = -100
"""Label of a token that carries no loss (the convention of torch's cross-entropy)."""

MANIFEST_NAME = "packtool.json"
PACKS_MANIFEST_NAME = "packs.json"
DROPPED_NAME = "dropped.jsonl"
INDEX_NAME = "index.arrow"
PREFIXES_NAME = "prefixes.arrow"
TRAIN_SPLIT = "train"
VAL_SPLIT = "val"

IMAGE_MARK = "<image>"
"""What a row's text holds where a picture goes."""

VIDEO_MARK = "<video>"
"""What a row's text holds where a video goes."""

AUDIO_MARK = "<audio>"
"""What a row's text holds where a sound goes."""

MEDIA_MARKS = {"image": IMAGE_MARK, "video": VIDEO_MARK, "audio": AUDIO_MARK}
"""The mark of each kind of medium."""

NAME_MARK, BOX_MARK = "<ref-object>", "<bbox>"
"""What a row's text holds where a name, or a box of its ``objects`` goes."""

ROLES = ("system", "user", "assistant", "tool")

MIN_SHARED = 64
"""Tokens that a prefix must have to be shared: few would cost attention more documents than they save it tokens."""

LEAST_PROMPT = 512
"""Tokens that a system prompt must have for rows to share it alone: all rows of a set may be one tree then."""

CHUNK_LOGITS = 2**26
"""Logits made at a time, 256 MiB in float32; where a micro-batch has more, backward makes them again."""
