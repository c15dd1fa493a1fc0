"""A tiny model and rows with pictures, exported in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from packtool.cache.export import export
from packtool.cache.manifest import ExportSummary
from packtool.config.data import ExportConfig
from packtool.progress import Progress, SilentProgress

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, template and settings of a Qwen3-VL form; no weights."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "vision_config": {}}))
    settings = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The file of ``write_rows``."""
    return write_rows(tmp_path)


def write_rows(folder: Path) -> Path:
    """600 rows: every third with a picture, some of them unusable."""
    for i in range(5):
        Image.new("RGB", (40 + 20 * i, 60)).save(folder / f"{i}.png")
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(600):
            answer = "word " * (i % 50)
            row: dict[str, Any] = {
                "messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": answer}],
                "channel": ("a", "b", None)[i % 3],
            }
            if i % 3 == 0:
                row["images"] = [f"{i % 5}.png" if i % 60 else "gone.png"]
            file.write(json.dumps(row) + "\n" if i % 101 else "{broken\n")
    return folder / "rows.jsonl"


@pytest.fixture
def run_export(model: Path, rows: Path, tmp_path: Path) -> Callable[..., ExportSummary]:
    """Exports the rows to ``tmp_path / name``."""

    def run(name: str = "cache", progress: Progress | None = None, **settings: Any) -> ExportSummary:
        return export_rows(tmp_path / name, progress, **{"model": str(model), "dataset": (str(rows),), **settings})

    return run


def export_rows(cache: Path, progress: Progress | None = None, **settings: Any) -> ExportSummary:
    """Export in shards of 50 rows; ``settings`` has the model and the dataset."""
    config = {"max_length": 200, "rows_per_shard": 50, **settings}
    return export(ExportConfig(output_dir=str(cache), **config), progress or SilentProgress())


class RecordingProgress(SilentProgress):
    """Records the messages to the user."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


def tree(folder: Path) -> dict[str, str]:
    """Every file of a folder with the SHA-256 of its bytes, so that a failed comparison names the files and ends."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}
