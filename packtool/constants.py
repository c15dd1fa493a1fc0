"""Numbers and names that more than one folder needs."""

from __future__ import annotations

VERSION = "0.1.0"
"""Version of packtool, as ``packtool.__version__`` shows it and every output records it."""

FORMAT_VERSION = 2
"""Version of the cache directory's layout; bumped when an older reader would misread it."""

IGNORE_INDEX = -100
"""Label of a token that carries no loss (the convention of torch's cross-entropy)."""

TRAIN_NEWLINE = "train_newline"
"""The rule of ``--loss-scale`` that also trains the white space after an assistant's end-of-turn token."""

MANIFEST_NAME = "packtool.json"
PACKS_MANIFEST_NAME = "packs.json"
DROPPED_NAME = "dropped.jsonl"
INDEX_NAME = "index.arrow"
PREFIXES_NAME = "prefixes.arrow"
TRAIN_SPLIT = "train"
VAL_SPLIT = "val"

IMAGE_MARK = "<image>"
"""Placeholder of an image in a row's text."""

VIDEO_MARK = "<video>"
"""Placeholder of a video in a row's text."""

AUDIO_MARK = "<audio>"
"""Placeholder of a sound in a row's text."""

MEDIA_MARKS = {"image": IMAGE_MARK, "video": VIDEO_MARK, "audio": AUDIO_MARK}
"""Placeholder of each kind of medium."""

NAME_MARK, BOX_MARK = "<ref-object>", "<bbox>"
"""Placeholders of a name and of a box of a row's ``objects``."""

ROLES = ("system", "user", "assistant", "tool")

MIN_SHARED = 64
"""Minimum tokens of a shared prefix: a shorter one would cost more in attention documents than it saves in tokens."""

MIN_PROMPT = 512
"""Minimum tokens of a system prompt that rows share alone; all rows of a dataset may then form one tree."""

CHUNK_LOGITS = 2**26
"""Logits computed at a time, 256 MiB in float32; if a micro-batch has more, the backward pass computes them again."""

CUT_PICTURE, UNCUT_PICTURE, TILE_VIDEO = range(3)
"""Forms of a medium of LLaVA-OneVision, which decide how the features of its tiles are joined."""
