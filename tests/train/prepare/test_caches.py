"""Caches and runs that do not fit each other are refused, with the command that would mend it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from packtool.cache.export import export
from packtool.cache.manifest import Manifest
from packtool.cache.reader import CacheReader
from packtool.config.data import ExportConfig
from packtool.encode.families import MediaLimits
from packtool.encode.model_files import ModelFiles
from packtool.errors import MismatchError, UnsupportedModelError
from packtool.progress import SilentProgress
from packtool.train.prepare.caches import check_limits, export_command, open_caches, refuse_stretched_positions
from packtool.train.prepare.from_rows import with_cache
from tests.train.tiny import TinyWorld, export_rows


def open_for(tiny: TinyWorld, **settings: Any) -> CacheReader:
    config = tiny.config("unused", **settings)
    return open_caches(config.cached_dataset, config, ModelFiles.load(config.model))


@pytest.mark.smoke
def test_a_cache_fits_the_model_it_was_exported_for(tiny: TinyWorld) -> None:
    assert len(open_for(tiny)) == 40


@pytest.mark.smoke
def test_another_tokenizer_is_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    model = shutil.copytree(tiny.model, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    token, other_token = list(vocab)[-2:]
    vocab[token], vocab[other_token] = vocab[other_token], vocab[token]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(MismatchError, match=r"tokenizer: [0-9a-f]+ in the cache, [0-9a-f]+ in the model") as exc_info:
        open_for(tiny, model=str(model))
    assert "chat template" not in exc_info.value.message
    assert f"--model {model}" in str(exc_info.value.remedy)


def test_another_template_is_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    model = shutil.copytree(tiny.model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(MismatchError, match="chat template"):
        open_for(tiny, model=str(model))


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_pixels": 112 * 112}, {"min_pixels": 4096, "max_pixels": 12544}, {"image_min_token_num": 4}],
    ids=str,
)
def test_equal_limits_are_accepted(settings: dict[str, int], tiny: TinyWorld) -> None:
    open_for(tiny, **settings)


@pytest.mark.parametrize(
    ("settings", "numbers", "option"),
    [
        ({"max_pixels": 1000}, r"most 12544 pixels.* 1000 ", "--max-pixels 1000"),
        ({"image_max_token_num": 10}, r"most 12544 pixels.* 10240 ", "--max-pixels 10240"),
        ({"min_pixels": 5000}, r"least 4096 pixels.* 5000 ", "--min-pixels 5000"),
    ],
    ids=str,
)
def test_different_limits_are_refused(settings: dict[str, int], numbers: str, option: str, tiny: TinyWorld) -> None:
    with pytest.raises(MismatchError, match=numbers) as exc_info:
        open_for(tiny, **settings)
    assert option in str(exc_info.value.remedy)


def test_limits_do_not_matter_for_a_text_cache(tiny: TinyWorld) -> None:
    manifest = open_for(tiny).manifests[0]
    text = dataclasses.replace(manifest, identity=dataclasses.replace(manifest.identity, media_limits=MediaLimits()))
    check_limits("cache", text, tiny.config("unused", max_pixels=1000))


def test_a_larger_maximum_length_is_refused_if_the_export_shortened_rows(tiny: TinyWorld, tmp_path: Path) -> None:
    short = tmp_path / "short"
    export_rows(tiny, short, max_length=48)
    num_left_out = 40 - len(open_for(tiny, cached_dataset=(str(short),)))
    assert num_left_out > 0
    open_for(tiny, cached_dataset=(str(short),), max_length=48)
    with pytest.raises(MismatchError, match=rf"--max-length 64 .* 48 .* {num_left_out} rows") as exc_info:
        open_for(tiny, cached_dataset=(str(short),), max_length=64, packing_length=64)
    assert "--max-length 64" in str(exc_info.value.remedy)
    # Of two caches, the one that lost rows decides.
    with pytest.raises(MismatchError, match=str(short)):
        open_for(tiny, cached_dataset=(tiny.cache, str(short)), max_length=64)


def test_a_larger_maximum_length_is_accepted_if_the_export_kept_all_rows(tiny: TinyWorld) -> None:
    open_for(tiny, max_length=4096, packing_length=4096)


def test_the_suggested_command_exports_the_cache_with_the_change(tiny: TinyWorld) -> None:
    words = shlex.split(export_command(tiny.cache, Manifest.read(tiny.cache), max_length=256))
    assert words[:2] == ["packtool", "export"]
    options = dict(zip(words[2::2], words[3::2], strict=False))
    assert options["--max-length"] == "256"
    assert options["--model"] == tiny.model
    assert options["--dataset"] == tiny.rows
    assert options["--output-dir"] == f"{tiny.cache}-2", "nothing is replaced"
    assert "--overwrite" not in words
    Path(f"{tiny.cache}-2").mkdir()
    command = shlex.split(export_command(tiny.cache, Manifest.read(tiny.cache)))
    Path(f"{tiny.cache}-2").rmdir()
    assert command[-1] == f"{tiny.cache}-3"


def test_the_suggested_command_works_from_any_folder(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.txt").write_text("a text to learn\n")
    monkeypatch.chdir(tmp_path)
    config = ExportConfig(
        model=tiny.model, max_length=64, output_dir="cache", dataset=("rows.txt",), prompt_format="alpaca:chat"
    )
    export(config, SilentProgress())
    assert export(config, SilentProgress()).already_finished
    monkeypatch.chdir("/")
    words = shlex.split(export_command(str(tmp_path / "cache"), Manifest.read(str(tmp_path / "cache"))))
    assert words[words.index("--dataset") + 1] == str(tmp_path / "rows.txt")
    assert words[words.index("--prompt-format") + 1] == "alpaca:chat"


def test_other_arguments_of_the_template_are_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    export_rows(tiny, cache, chat_template_kwargs={"reasoning_effort": "low"})
    for same in (None, {}, {"reasoning_effort": "low", "other": None}):
        assert len(open_for(tiny, cached_dataset=(str(cache),), chat_template_kwargs=same)) == 40
    with pytest.raises(MismatchError, match=r"exported with --chat-template-kwargs .*'low'.*'high'") as exc_info:
        open_for(tiny, cached_dataset=(str(cache),), chat_template_kwargs={"reasoning_effort": "high"})
    words = shlex.split(str(exc_info.value.remedy).splitlines()[-1])
    assert json.loads(words[words.index("--chat-template-kwargs") + 1]) == {"reasoning_effort": "high"}
    with pytest.raises(MismatchError, match="exported without --chat-template-kwargs"):
        open_for(tiny, chat_template_kwargs={"reasoning_effort": "high"})


def test_caches_of_rows_depend_on_arguments_of_the_template(tiny: TinyWorld, tmp_path: Path) -> None:
    """``train --dataset`` makes a cache for each value, and ``--system`` is part of it."""
    caches = []
    for changes in ({}, {"chat_template_kwargs": {"x": 1}}, {"system": "Be brief."}, {"chat_template_kwargs": {}}):
        settings = {"cached_dataset": (), "dataset": (tiny.rows,), "cache_dir": str(tmp_path), **changes}
        config = with_cache(tiny.config(tmp_path / "out", **settings), SilentProgress(), lambda _: None)
        open_caches(config.cached_dataset, config, ModelFiles.load(config.model))
        caches += config.cached_dataset
    assert len(set(caches)) == 3
    assert caches[0] == caches[3]
    assert Manifest.read(caches[1]).identity.spec["chat_template_kwargs"] == {"x": 1}


PHI3 = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope"}}


@pytest.mark.parametrize(
    ("config", "longest_allowed"),
    [
        (PHI3, 16),
        ({"text_config": PHI3}, 16),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 20}}, 20),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}, "max_position_embeddings": 30}, 30),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10_000}, "max_position_embeddings": 16}, None),
    ],
)
def test_frequencies_that_depend_on_the_longest_sample(config: dict[str, Any], longest_allowed: int | None) -> None:
    refuse_stretched_positions(config, longest_allowed or 100_000)
    if longest_allowed is not None:
        with pytest.raises(UnsupportedModelError, match=f"more than {longest_allowed} tokens"):
            refuse_stretched_positions(config, longest_allowed + 1)


def test_a_pack_of_a_model_with_stretched_positions_is_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    model = shutil.copytree(tiny.model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 8}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="dynamic") as exc_info:
        open_for(tiny, model=str(model))
    assert "--max-length 8" in str(exc_info.value.remedy)
    assert len(open_for(tiny, model=str(model), packing=False)) == 40
