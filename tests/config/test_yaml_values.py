"""Numbers and words of YAML are what people mean by them, in ``--set`` and in ``--config`` alike."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from packtool.cli.main import _SETTINGS, run
from packtool.config import settings
from packtool.config.settings import (
    FALSE_WORDS,
    TRUE_WORDS,
    Synonyms,
    annotations_of,
    declared_type,
    load_json,
    parse_yaml,
    resolve,
    value_type,
)
from packtool.config.train import TrainConfig
from packtool.translate.read import load_config_file

TRAIN = {"model": "m", "cached_dataset": ("c",), "output_dir": "o"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-6", 1e-6), ("2E5", 2e5), ("-1.5e+3", -1500.0), (".5", 0.5), ("3", 3), ("-7", -7), ("0x10", 16)],
        *[("true", True), ("False", False), ("no", "no"), ("on", "on"), ("null", None), ("", None)],
        *[("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("v1.2.3", "v1.2.3"), ('"1e-6"', "1e-6")],
        ("{min_lr: 1e-5, on: [2e-4, no]}", {"min_lr": 1e-5, "on": [2e-4, "no"]}),
    ],
)
def test_plain_scalars(text: str, value: Any) -> None:
    value_read = parse_yaml(text)
    assert (value_read, type(value_read)) == (value, type(value))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_written_by_python_are_read_back(value: float) -> None:
    for text in (repr(value), f"{value:g}", f"{value:.3e}"):
        assert parse_yaml(text) == float(text)


def test_yaml_files_and_set_read_values_alike(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("packing: yes\ntraining:\n  adam_epsilon: 1e-6\n  run_name: no\n")
    for config in (
        resolve(TrainConfig, TRAIN, file=load_config_file(str(tmp_path / "a.yaml"))),
        resolve(TrainConfig, TRAIN, sets=["packing=yes", "training.adam_epsilon=1e-6", "training.run_name=no"]),
    ):
        assert config.packing is True
        assert config.training == {"adam_epsilon": 1e-6, "run_name": "no"}


def read(raw: Any, hint: Any) -> Any:
    """What a setting makes of a value, or that it refuses it."""
    try:
        return settings._convert(raw, hint)
    except ValueError:
        return "refused"


def test_yaml_values_mean_the_same_as_on_the_command_line() -> None:
    field_names = set()
    for command, cls in _SETTINGS.items():
        for field in dataclasses.fields(cls):
            hint, plain = declared_type(field, cls), value_type(field, cls)
            choices = typing.get_args(plain) if typing.get_origin(plain) is Literal else ()
            synonyms = [note for note in annotations_of(hint) if isinstance(note, Synonyms)]
            if not choices and plain is not str:
                continue
            for word in (*choices, *(word for note in synonyms for word in note.words), *TRUE_WORDS, *FALSE_WORDS):
                value = read(word, hint)
                assert read(parse_yaml(word), hint) == value, (command, field.name, word)
                if word in choices:
                    assert value == word
                    field_names |= {field.name} if parse_yaml(word) != word else set()
            for words, meaning in ((TRUE_WORDS, "true"), (FALSE_WORDS, "false"), (FALSE_WORDS, "no")):
                if meaning in choices:
                    assert [read(word, hint) for word in words] == [meaning] * len(words), (command, field.name)
    assert field_names == {"expand_turns", "init_weights", "share_prefix"}
    config = resolve(TrainConfig, TRAIN, file={"init_weights": True, "save_strategy": False, "target_modules": [True]})
    assert (config.init_weights, config.save_strategy, config.target_modules) == ("true", "no", ("true",))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 5000 + "]" * 5000])
def test_too_deeply_nested_values_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nest too deeply"):
        load_json("[" * 100_000 + text)
    with pytest.raises(yaml.YAMLError, match="nest too deeply"):
        parse_yaml(text)
    with pytest.raises(yaml.YAMLError, match="digits"):
        parse_yaml("9" * 5000)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--mix", "DEEP.yaml", "--packing-length", "9"],
        ["plan", "--config", "DEEP.yaml"],
        ["plan", "c", "--set", "max_length=DEEP"],
        [
            "export",
            "--model",
            "DEEP",
            "--dataset-info",
            "DEEP.json",
            "--dataset",
            "d",
            "--max-length",
            "9",
            "--output-dir",
            "o",
        ],
        ["export", "--model", "DEEP", "--dataset", "d", "--max-length", "9", "--output-dir", "o"],
        ["simulate", "--distribution", "wikipedia", "--model", "DEEP", "--packing-length", "9"],
        ["simulate", "--lengths", "DEEP.json", "--packing-length", "9"],
        ["simulate", "--distribution", "wikipedia", "--hardware", "DEEP.json", "--packing-length", "9"],
    ],
)
def test_too_deeply_nested_files_are_usage_errors(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    deep = "[" * 100_000
    Path("DEEP").mkdir()
    for name in ("DEEP.yaml", "DEEP.json", "DEEP/config.json"):
        Path(name).write_text(deep)
    assert run([word.replace("=DEEP", f"={deep[:5000]}") for word in words]) in (2, 3)
    assert "nest too deeply" in capsys.readouterr().err
