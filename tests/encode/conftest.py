"""Real and hand-made models for encoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from packtool.config.data import EncodeSpec
from packtool.encode import encoder as encoder_module
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles

ModelMaker = Callable[..., Path]


def encoder_for(directory: Path, **spec: Any) -> Encoder:
    """An encoder for a model directory."""
    settings = {"model": str(directory), "max_length": 1_000_000, **spec}
    return Encoder(EncodeSpec(**settings), ModelFiles.load(str(directory)))


@pytest.fixture(scope="session", autouse=True)
def _vocabularies_are_read_once() -> Iterator[None]:
    """Encoders of the same files share a tokenizer: most tests' time would go into reading the real ones again."""
    read, known = encoder_module._load_tokenizer, dict[tuple[str, ...], Tokenizer]()

    def read_once(files: ModelFiles) -> Tokenizer:
        # Template and configuration decide which tokens an encoder marks as special.
        cache_key = (files.tokenizer_json, files.chat_template, json.dumps(files.config))
        if cache_key not in known:
            known[cache_key] = read(files)
        return known[cache_key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "_load_tokenizer", read_once)
        yield


@pytest.fixture(scope="session")
def qwen3_vl(data: Path) -> Encoder:
    """With the real Qwen3-VL tokenizer and settings."""
    return encoder_for(data / "tokenizers" / "qwen3-vl")


@pytest.fixture(scope="session")
def text_model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Makes directories of text-only models: the real vocabulary with one of the real text templates."""

    @cache
    def make(template: str) -> Path:
        folder = tmp_path_factory.mktemp(template)
        source = data / "tokenizers" / "qwen3-vl"
        shutil.copy(source / "tokenizer.json", folder)
        settings = json.loads((source / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        shutil.copy(data / "tokenizers" / f"{template}.jinja", folder / "chat_template.jinja")
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        return folder

    return make


@pytest.fixture
def small_model(tmp_path: Path) -> ModelMaker:
    """Makes a text model with a byte tokenizer, some control tokens and a template."""

    def make(template: str, control: list[str], config: dict[str, Any] | None = None) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(template)
        (tmp_path / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
        (tmp_path / "preprocessor_config.json").write_text(
            json.dumps({"patch_size": 2, "merge_size": 2, "min_pixels": 16, "max_pixels": 1600})
        )
        return tmp_path

    return make
