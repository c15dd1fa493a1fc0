"""Small models that take media of all kinds, with a tokenizer of single bytes, and rows for them.

A Qwen2.5-Omni sees and hears, a Qwen3-VL sees.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packtool.cache.export import export
from packtool.config.data import ExportConfig
from packtool.progress import SilentProgress
from scripts._golden_world import make_model, omni_config, vision_config
from tests.batch.reduced import make_picture
from tests.media.clips import write_clip, write_sound
from tests.train.tiny import TinyWorld

KINDS = ("text", "picture", "video", "sound")


def make_media_world(root: Path, *, hears: bool) -> TinyWorld:
    """A model and media; ``export_kinds`` makes the rest."""
    tiny = TinyWorld(str(root / "model"), str(root / "cache"), str(root / "rows.jsonl"))
    make_model(root / "model", omni_config if hears else vision_config)
    (root / "picture.png").write_bytes(make_picture(60, 40, seed=0))
    write_clip(root / "video.mp4", num_frames=12, size=(56, 56))
    write_sound(root / "sound.wav", 0.3, rate=16000)
    return tiny


def write_rows(tiny: TinyWorld, rows: Sequence[Sequence[str]]) -> None:
    """A row for each combination of ``KINDS``, in this order."""
    root = Path(tiny.rows).parent
    names = {"picture": ("image", "picture.png"), "video": ("video", "video.mp4"), "sound": ("audio", "sound.wav")}
    lines = []
    for row_index, kinds in enumerate(rows):
        media = [names[kind] for kind in kinds if kind != "text"]
        question = "".join(f"<{kind}>" for kind, _ in media) + "abcdefgh"[: 1 + row_index % 8]
        row: dict[str, Any] = {"images": [], "videos": [], "audios": []}
        for kind, file in media:
            row[f"{kind}s"].append(str(root / file))
        answer = {"role": "assistant", "content": "xyz" * (1 + row_index % 3)}
        lines.append(json.dumps({"messages": [{"role": "user", "content": question}, answer], **row}))
    Path(tiny.rows).write_text("\n".join(lines))


def export_kinds(tiny: TinyWorld, cache: str, rows: Sequence[Sequence[str]]) -> TinyWorld:
    """The rows, exported as they follow each other."""
    write_rows(tiny, rows)
    limits: dict[str, Any] = {"max_pixels": 56 * 56, "min_pixels": 28 * 28}
    if (Path(tiny.model) / "video_preprocessor_config.json").exists():
        limits |= {"fps_max_frames": 4}  # which has its own
    else:
        limits |= {"video_max_pixels": 56 * 56, "video_min_pixels": 28 * 28}
    export_options: dict[str, Any] = {
        "model": tiny.model,
        "dataset": (tiny.rows,),
        "output_dir": cache,
        "max_length": 512,
    }
    export(ExportConfig(**export_options | limits), SilentProgress())
    return TinyWorld(tiny.model, cache, tiny.rows)
