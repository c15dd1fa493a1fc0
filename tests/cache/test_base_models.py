"""Models without a chat template: texts are exported as they are, conversations ask for a template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from packtool.cache.export import export
from packtool.cache.manifest import ExportSummary, Manifest
from packtool.cache.reader import CacheReader
from packtool.config.data import EncodeSpec, ExportConfig
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, MismatchError
from packtool.progress import SilentProgress
from tests.cache.conftest import CHATML


@pytest.fixture
def base(model: Path, tmp_path: Path) -> Path:
    """The tiny model without its chat template."""
    folder = tmp_path / "base"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "chatml.jinja"
    path.write_text(CHATML)
    return path


def exported(base: Path, name: str, **settings: Any) -> ExportSummary:
    options: dict[str, Any] = {"model": str(base), "max_length": 200, "output_dir": str(base.parent / name), **settings}
    return export(ExportConfig(**options), SilentProgress())


def texts_of(folder: Path) -> tuple[str, ...]:
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": f"text {i}"}) for i in range(9)))
    (folder / "lines.txt").write_text("a line\nanother\n")
    return str(folder / "texts.jsonl"), str(folder / "lines.txt")


def conversations_of(folder: Path) -> str:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (folder / "talk.jsonl").write_text("\n".join(json.dumps({"messages": turns}) for _ in range(5)))
    return str(folder / "talk.jsonl")


@pytest.mark.parametrize("num_proc", [1, 2])
def test_texts_need_no_template(base: Path, num_proc: int) -> None:
    summary = exported(base, "texts", dataset=texts_of(base.parent), dataset_num_proc=num_proc)
    assert (summary.num_samples, sum(summary.dropped.values())) == (11, 0)
    sample = CacheReader.open([str(base.parent / "texts")]).sample(0)
    assert sample.labels.tolist() == sample.input_ids.tolist()


def test_conversations_need_a_template(base: Path, template: Path) -> None:
    conversations = conversations_of(base.parent)
    with pytest.raises(
        ConfigError, match=r"talk\.jsonl holds conversations\nGive a template with --chat-template FILE"
    ):
        exported(base, "talk", dataset=(conversations,))
    assert not (base.parent / "talk").exists()
    assert (
        exported(base, "talk", dataset=(conversations, *texts_of(base.parent)), chat_template=str(template)).num_samples
        == 16
    )
    # Equal to a model with its own template; the path is only reported.
    (base / "chat_template.jinja").write_text(CHATML)
    exported(base, "own", dataset=(conversations, *texts_of(base.parent)))
    packaged, custom = (Manifest.read(str(base.parent / name)) for name in ("talk", "own"))
    assert packaged.fingerprint == custom.fingerprint
    assert packaged.identity.spec["chat_template"] == str(template)
    assert "chat_template" not in custom.identity.spec


def test_later_conversations_are_dropped_with_a_warning(base: Path) -> None:
    """No row ends an export, so those that the first look did not see are counted like others that cannot be used."""
    conversations_file = Path(conversations_of(base.parent))
    conversations_file.write_text("{broken\n" * 64 + conversations_file.read_text())
    summary = exported(base, "mixed", dataset=(*texts_of(base.parent), str(conversations_file)))
    assert summary.num_samples == 11
    assert summary.dropped == {"invalid_json": 64, "no_chat_template": 5}


def test_the_template_is_identified_by_its_content(base: Path, template: Path, tmp_path: Path) -> None:
    conversations = conversations_of(tmp_path)
    exported(base, "talk", dataset=(conversations,), chat_template=str(template))
    moved = template.rename(tmp_path / "moved.jinja")
    assert exported(base, "talk", dataset=(conversations,), chat_template=str(moved)).already_finished
    moved.write_text(CHATML.replace("\n", "\n\n"))
    with pytest.raises(MismatchError, match="template_hash"):
        exported(base, "talk", dataset=(conversations,), chat_template=str(moved))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "No such file"), ("", "the file is empty"), ("{% if %}", "not valid Jinja")]
)
def test_invalid_template_files_are_refused(base: Path, text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jinja"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        exported(base, "talk", dataset=(conversations_of(tmp_path),), chat_template=str(path))


def test_no_tokenizer(base: Path) -> None:
    (base / "tokenizer.json").unlink()
    with pytest.raises(
        ConfigError, match=r"base has no tokenizer: it contains none of tokenizer\.json, tokenizer\.model, .*\nCopy"
    ):
        ModelFiles.load(str(base))


def test_options_that_are_not_given_are_not_recorded() -> None:
    names = {"chat_template", "bbox_type", "bbox_format", "norm_bbox"}
    assert names.isdisjoint(EncodeSpec(model="m", max_length=9).recorded())
