"""Caches made of what other tools have tokenized: their layouts, and the same cache as from the rows themselves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from packtool.cache.export import export
from packtool.cache.manifest import ExportSummary
from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.config.data import ImportConfig
from packtool.encode.encoded import EncodedSample
from packtool.planning.packing import pack
from packtool.rows.forms import RowProblem
from tests.cache.conftest import RecordingProgress
from tests.rows.megatron import megatron

Export = Callable[..., ExportSummary]
START, END, PAD = 258, 259, 260
IGNORED = -100


@pytest.fixture(scope="module")
def model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a configuration that names the tokens of pictures, as real ones do."""
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(model, folder)
    named = {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": PAD, "vision_start_token_id": START}
    (folder / "config.json").write_text(json.dumps(named))
    return folder


@pytest.fixture
def import_rows(model: Path, tmp_path: Path) -> Callable[..., tuple[list[EncodedSample], dict[str, int], list[str]]]:
    """Samples of an import, rows dropped by reason, and what was said."""

    def make(
        *paths: Path, name: str = "imported", **settings: Any
    ) -> tuple[list[EncodedSample], dict[str, int], list[str]]:
        progress = RecordingProgress()
        options: dict[str, Any] = {"model": str(model), "max_length": 10_000, **settings}
        config = ImportConfig(dataset=tuple(map(str, paths)), output_dir=str(tmp_path / name), **options)
        summary = export(config, progress)
        reader = CacheReader.open([str(tmp_path / name)])
        return [reader.sample(i) for i in range(len(reader))], dict(summary.dropped), progress.notes

    return make


Imported = Callable[..., tuple[list[EncodedSample], dict[str, int], list[str]]]


def saved_dataset(rows: list[dict[str, Any]], path: Path) -> Path:
    """Rows as a dataset saved to disk, as the tools save theirs."""
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def exported_rows(folder: Path) -> list[dict[str, Any]]:
    """The tokens of a cache as another tool would have them."""
    reader = CacheReader.open([str(folder)])
    rows = []
    for i in range(len(reader)):
        sample = reader.sample(i)
        row = {
            "input_ids": sample.input_ids.tolist(),
            "attention_mask": [1] * sample.length,
            "labels": sample.labels.tolist(),
            "images": [image.path for image in sample.images],
            "videos": [],
            "audios": [],
            "channel": sample.channel,
        }
        rows.append(row)
    return rows


def assert_same_caches(directory: Path, other_directory: Path) -> None:
    one, other = CacheReader.open([str(directory)]), CacheReader.open([str(other_directory)])
    assert len(one) == len(other) > 0
    for i in range(len(one)):
        a, b = one.sample(i), other.sample(i)
        for name in ("input_ids", "labels", "turns"):
            assert getattr(a, name).tolist() == getattr(b, name).tolist(), name
        assert (a.images, a.channel, a.num_truncated) == (b.images, b.channel, b.num_truncated)
    for name in ("length", "target_tokens", "media_tokens", "channel"):
        assert getattr(one.index, name).tolist() == getattr(other.index, name).tolist(), name


@pytest.mark.parametrize("scale", ["default", "last_round", "all"])
def test_tokens_of_a_cache_make_the_same_cache(run_export: Export, model: Path, tmp_path: Path, scale: str) -> None:
    run_export(loss_scale=scale)
    run_export("whole")
    prepared = saved_dataset(exported_rows(tmp_path / "whole"), tmp_path / "prepared")
    options: dict[str, Any] = {"max_length": 200, "rows_per_shard": 50, "loss_scale": scale}
    options["media_root"] = str(tmp_path)
    config = ImportConfig(model=str(model), dataset=(str(prepared),), output_dir=str(tmp_path / "imported"), **options)
    summary = export(config, RecordingProgress())
    assert not summary.dropped
    assert_same_caches(tmp_path / "cache", tmp_path / "imported")
    plans = [pack(CacheReader.open([str(tmp_path / name)]).index.length, 400, seed=0) for name in ("cache", "imported")]
    assert plans[0].samples.tolist() == plans[1].samples.tolist()


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_truncation_of_tokens_is_that_of_rows(
    run_export: Export, import_rows: Imported, tmp_path: Path, strategy: str
) -> None:
    run_export("whole")
    prepared = saved_dataset(exported_rows(tmp_path / "whole"), tmp_path / "prepared")
    limits = {"max_length": 60, "truncation_strategy": strategy, "rows_per_shard": 50}
    run_export("short", **limits)
    import_rows(prepared, media_root=str(tmp_path), **limits)
    reader = CacheReader.open([str(tmp_path / "imported")])
    by_ids = {tuple(sample.input_ids.tolist()) for sample in map(reader.sample, range(len(reader)))}
    all_rows = {(row["channel"], tuple(row["input_ids"])) for row in exported_rows(tmp_path / "whole")}
    short = CacheReader.open([str(tmp_path / "short")])
    expected = [short.sample(i) for i in range(len(short))]
    assert len(all_rows) > 100
    assert by_ids <= {tuple(sample.input_ids.tolist()) for sample in expected}
    assert any(sample.num_truncated and sample.images for sample in expected)


BOUNDARIES = ("seq_lengths", "seq_lens", "cu_seqlens", "cu_seq_lens_q", "seq_start_id", "attention_mask")
POSITIONS = ("flat", "nested", "text_and_mrope", "mrope", "batched")
DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 255), st.booleans()), min_size=2, max_size=12), min_size=1, max_size=6
)


def positions_of(lengths: list[int], padding: int, layout: str) -> Any:
    """Positions that begin anew in each sample, in the ways that trainers have them."""
    text = [at for length in lengths for at in range(length)] + [0] * padding
    moved = [at + (at > 2) for at in text]  # as behind a picture
    layouts: dict[str, Any] = {
        "flat": text,
        "nested": [text],
        "text_and_mrope": [text, moved, text, [float(at) for at in moved]],
        "mrope": [moved, text, moved],
        "batched": [[text], [moved], [text], [moved]],
    }
    return layouts[layout]


def boundary_column(name: str, lengths: list[int], padding: int) -> list[int]:
    """Where samples begin, as a column of that name tells it; padding is one more sample where it has no other way."""
    padded = lengths + [padding] * (padding > 0)
    edges = np.cumsum([0, *padded]).tolist()
    if name in ("seq_lengths", "seq_lens"):
        return padded
    if name == "attention_mask":
        return [n for n, length in enumerate(lengths, 1) for _ in range(length)] + [0] * padding
    return edges[:-1] if name == "seq_start_id" else edges


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    DOCUMENTS,
    st.integers(0, 5),
    st.sets(st.sampled_from(BOUNDARIES), max_size=3),
    st.sampled_from((*POSITIONS, None)),
    st.booleans(),
)
def test_imported_packs_are_split_into_samples(
    make_encoder: Any,
    documents: list[list[tuple[int, bool]]],
    padding: int,
    names: set[str],
    positions: str | None,
    as_arrays: bool,
) -> None:
    """Whatever says where samples begin, a packed row gives what its samples give as rows."""
    if not names and positions is None:
        names = {"cu_seqlens"}
    ids = [[token for token, _ in document] for document in documents]
    labels = [[token if trained else IGNORED for token, trained in document] for document in documents]
    alone_samples = [make_encoder({"input_ids": a, "labels": b}) for a, b in zip(ids, labels, strict=True)]
    row: dict[str, Any] = {"input_ids": list(chain(*ids)), "labels": list(chain(*labels))}
    lengths = [len(document) for document in documents]
    row |= {name: boundary_column(name, lengths, padding) for name in names}
    if positions is not None:
        row["position_ids"] = positions_of(lengths, padding, positions)
    row["input_ids"] += [0] * padding
    row["labels"] += [IGNORED] * padding
    if as_arrays:
        row = {name: np.array(value) for name, value in row.items()}
    packed = make_encoder(row)
    assert (packed or []) == [sample for samples in alone_samples for sample in samples or ()]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOCUMENTS, st.sampled_from(BOUNDARIES), st.data())
def test_columns_that_disagree_about_a_pack_are_refused(
    make_encoder: Any, documents: list[list[tuple[int, bool]]], name: str, data: st.DataObject
) -> None:
    lengths = [len(document) for document in documents]
    total = sum(lengths)
    others = data.draw(st.sets(st.integers(2, total - 2)) if total > 3 else st.just(set()))
    moved = np.diff([0, *sorted(others), total]).tolist()
    row = {
        "input_ids": [token for document in documents for token, _ in document],
        name: boundary_column(name, lengths, 0),
        "position_ids": positions_of(moved, 0, "flat"),
    }
    # Positions without a second beginning, and a mask of ones alone, say nothing.
    is_silent = len(moved) == 1 or (name == "attention_mask" and len(lengths) == 1)
    assume(moved != lengths and not is_silent and min(moved) > 1)
    with pytest.raises(RowProblem, match="disagree on whether a sample begins at token"):
        make_encoder(row)


@pytest.fixture(scope="module")
def make_encoder(model: Path) -> Callable[[dict[str, Any]], list[tuple[list[int], list[int]]] | None]:
    """Tokens and labels of what a row becomes; None if it is dropped."""
    from packtool.config.data import EncodeSpec
    from packtool.encode.encoder import Encoder
    from packtool.encode.model_files import ModelFiles
    from packtool.rows.forms import to_sample
    from packtool.rows.sample import Dropped
    from packtool.rows.source import Source

    encoder = Encoder(EncodeSpec(model=str(model), max_length=1000), ModelFiles.load(str(model)))

    def encode(row: dict[str, Any]) -> list[tuple[list[int], list[int]]] | None:
        (result,) = encoder.encode([to_sample(row, Source("rows.jsonl", form="prepared"), 0)])
        if isinstance(result, Dropped):
            assert result.reason == "no_target_tokens"
            return None
        return [(sample.input_ids.tolist(), sample.labels.tolist()) for sample in result]

    return encode


def pictures(tmp_path: Path, imported: Imported) -> tuple[list[list[int]], list[str]]:
    """Tokens of two rows with a picture each, as LLaMA-Factory would have them, and the pictures."""
    sizes, documents = [(40, 60), (100, 60)], []
    names = []
    for index, size in enumerate(sizes):
        name = str(tmp_path / f"p{index}.png")
        Image.new("RGB", size).save(name)
        names.append(name)
        # 32 pixels a side of a token, at least 1024 in all
        pads = round(size[0] / 32) * round(size[1] / 32)
        documents.append([1, 2, START, *[PAD] * pads, END, 3, 4 + index])
    return documents, names


def test_llama_factory_packs_with_images_are_imported(import_rows: Imported, tmp_path: Path) -> None:
    (first_ids, second_ids), names = pictures(tmp_path, import_rows)
    text = [7, 8, 9]
    ids = [*first_ids, *text, *second_ids]
    lengths = [len(first_ids), len(text), len(second_ids)]
    labels = [IGNORED] * len(ids)
    for end in np.cumsum(lengths):
        labels[end - 1] = ids[end - 1]
    row = {
        "input_ids": [*ids, 0, 0],
        "attention_mask": [n for n, length in enumerate(lengths, 1) for _ in range(length)] + [0, 0],
        "position_ids": [at for length in lengths for at in range(length)] + [0, 0],
        "labels": [*labels, IGNORED, IGNORED],
        "images": names,
        "videos": None,
        "audios": None,
    }
    plain = {**row, "attention_mask": [1] * (len(ids) + 2)}
    dataset_dict = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list([row, plain]), "validation": datasets.Dataset.from_list([row])}
    )
    dataset_dict.save_to_disk(str(tmp_path / "prepared"))
    samples, dropped, notes = import_rows(tmp_path / "prepared", media_root=str(tmp_path))
    assert not dropped
    assert [sample.input_ids.tolist() for sample in samples] == [first_ids, text, second_ids] * 2
    assert [[image.path for image in sample.images] for sample in samples] == [names[:1], [], names[1:]] * 2
    assert all((sample.labels != IGNORED).sum() == 1 for sample in samples)
    (note,) = [line for line in notes if "LLaMA-Factory" in line]
    assert "input_ids, labels, attention_mask, position_ids, images" in note
    assert "split into samples (up to 3 per row)" in note
    assert any("rows do not record their tokenizer, chat template and truncation" in line for line in notes)
    validation = str(tmp_path / "prepared" / "validation")
    assert any(f"not validation; to use it for validation, add --val-dataset {validation}" in line for line in notes)
    _, _, notes = import_rows(tmp_path / "prepared", name="both", media_root=str(tmp_path), val_dataset=(validation,))
    assert len(CacheReader.open([str(tmp_path / "both")], "val")) == 3
    assert not any("not validation" in line for line in notes)


def test_axolotl_rows_are_imported(import_rows: Imported, tmp_path: Path) -> None:
    rows = [
        {
            "input_ids": [1, 2, 3, 4],
            "attention_mask": [1] * 4,
            "labels": [IGNORED, IGNORED, 3, 4],
            "position_ids": [0, 1, 2, 3],
            "length": 4,
        }
    ]
    samples, dropped, notes = import_rows(saved_dataset(rows, tmp_path / "prepared"))
    assert not dropped
    assert [sample.labels.tolist() for sample in samples] == [[IGNORED, IGNORED, 3, 4]]
    assert any("prepared by axolotl" in note for note in notes)


@pytest.mark.parametrize(
    "made_of",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"prompt": "a", "completion": "b"},
        {"text": "a text"},
    ],
)
def test_trl_rows_are_imported_as_tokens_and_exported_as_rows(
    import_rows: Imported, model: Path, tmp_path: Path, made_of: dict[str, Any]
) -> None:
    rows: list[dict[str, Any]] = [
        {
            **made_of,
            "input_ids": [5, 6, 7, 8, 9, 10],
            "completion_mask": [0, 1, 1, 0, 0, 1],
            "assistant_masks": [1, 1, 0, 0, 1, 1],
            "seq_lengths": [4, 2],
        }
    ]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    samples, dropped, notes = import_rows(path)
    assert not dropped
    assert [sample.input_ids.tolist() for sample in samples] == [[5, 6, 7, 8], [9, 10]]
    assert [sample.labels.tolist() for sample in samples] == [[IGNORED, 6, IGNORED, IGNORED], [IGNORED, 10]]
    assert any("prepared by TRL" in note for note in notes)
    arguments = ["--model", str(model), "--max-length", "100", "--output-dir", str(tmp_path / "exported")]
    assert run(["export", "--dataset", str(path), *arguments]) == 0
    reader = CacheReader.open([str(tmp_path / "exported")])
    assert reader.sample(0).input_ids.tolist() != rows[0]["input_ids"]


def test_ms_swift_rows_are_tokenized_with_a_note(import_rows: Imported, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "lengths": [9]}]
    samples, dropped, notes = import_rows(saved_dataset(rows, tmp_path / "prepared"))
    assert (len(samples), dropped) == (1, {})
    assert any("without tokens (form messages), as in ms-swift's" in note and "tokenized now" in note for note in notes)


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (5, "<i8")])
def test_megatron_documents_are_imported(import_rows: Imported, tmp_path: Path, code: int, kind: str) -> None:
    sequences = [[1, 2, 3], [4, 5], [6, 7], *([n % 200, 9] for n in range(200))]
    path = megatron(tmp_path / "text_document", sequences, [0, 1, 3, *range(4, 204)], code, kind)
    samples, dropped, notes = import_rows(path)
    assert not dropped
    assert [sample.input_ids.tolist() for sample in samples] == [[1, 2, 3], [4, 5, 6, 7], *sequences[3:]]
    assert all((sample.labels == sample.input_ids).all() for sample in samples)
    (note,) = [line for line in notes if "Megatron" in line]
    assert "no labels, so every token is a target" in note


def test_broken_megatron_file_is_an_error(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = megatron(tmp_path / "text", [[1, 2, 3], [4, 5]], [0, 1, 2])
    contents, tokens = path.read_bytes(), path.with_suffix(".bin")
    arguments = ["import", str(path), "--model", str(model), "--max-length", "9", "--output-dir", str(tmp_path / "c")]
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: tokens.write_bytes(tokens.read_bytes()[:-1]), "ends before byte 10"),
        (lambda: path.write_bytes(b"nothing"), "does not begin with MMIDIDX"),
        (lambda: path.write_bytes(contents[:-1]), "bytes, but its head requires"),
        (lambda: path.write_bytes(contents + b"\x00\x01"), "multimodal"),
        (lambda: path.write_bytes(contents[:17] + b"\x06" + contents[18:]), "number type 6"),
        (lambda: tokens.unlink(), "text.bin"),
    ]
    for spoil, message in cases:
        spoil()
        assert run(arguments) in (3, 5)
        assert message in capsys.readouterr().err
        if message != "text.bin":
            megatron(tmp_path / "text", [[1, 2, 3], [4, 5]], [0, 1, 2])
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        (
            {"input_ids": [1, 2, 999]},
            "token_out_of_range",
            "token 2 is 999, and the largest id of the model's tokenizer is 260",
        ),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, IGNORED]}, "labels_shifted", "already shifted"),
        (
            {"input_ids": [1, 2, 3], "labels": [IGNORED, 9, 3]},
            "labels_differ",
            "the label of token 1 is 9; it must be the token itself (2)",
        ),
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "invalid_tokens", "'labels' has 2 values for 3 tokens"),
        ({"input_ids": [1, 2], "labels": [IGNORED] * 2}, "no_target_tokens", ""),
        (
            {"input_ids": [1] * 10_003, "position_ids": [0, 1, *range(10_001)]},
            "over_max_length",
            "sample 2 of 2 in the row: 10001 tokens",
        ),
        ({"input_ids": [1, 2, 3, 4], "labels": [IGNORED] * 4, "seq_lengths": [2, 2]}, "no_target_tokens", "of the 2"),
        ({"input_ids": []}, "empty_tokens", ""),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "empty_tokens", "padding"),
        ({"input_ids": [[1, 2]]}, "invalid_tokens", "not a list of integers"),
        ({"input_ids": [[1], [2, 3]]}, "invalid_tokens", "[[1], [2, 3]], not a list of integers"),
        ({"input_ids": [1, 2], "seq_lengths": [[1], [1, 0]]}, "invalid_tokens", "not a list of integers"),
        ({"input_ids": [1.5, 2]}, "invalid_tokens", "not a list of integers"),
        ({"input_ids": [1, 2, 3], "seq_lengths": [1, 1]}, "invalid_tokens", "the sum of 'seq_lengths' is 2"),
        ({"input_ids": [1, 2, 3], "cu_seqlens": [0, 2]}, "invalid_tokens", "must increase from 0 to 3"),
        ({"input_ids": [1, 2, 3], "cu_seqlens": [0, 2, 1, 3]}, "invalid_tokens", "must increase from 0 to 3"),
        ({"input_ids": [1, 2, 3], "seq_start_id": [1]}, "invalid_tokens", "must increase from 0 to 3"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1]}, "invalid_tokens", "not one number for each of 3 tokens"),
        ({"input_ids": [1, 2], "position_ids": [[0, 1], [0, 1]]}, "invalid_tokens", "or 3 or 4 such lists"),
        ({"input_ids": [1, 2], "position_ids": [[0, 1], [0]]}, "invalid_tokens", "or 3 or 4 such lists"),
        ({"input_ids": [1, 2, 3], "position_ids": [0, 1, 5]}, "unknown_boundaries", "change from 1 to 5 at token 2"),
        ({"input_ids": [1, 2, 3], "segment_ids": [1, 1, 2]}, "unknown_boundaries", "'segment_ids' may contain"),
        ({"input_ids": [1, 2], "packing_params": {"a": [0], "b": 1}}, "unknown_boundaries", "'packing_params'"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, "unknown_loss_mask", "--columns completion_mask=loss_mask"),
        ({"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 0, 1]}, "invalid_tokens", "0 at token 2, in the middle"),
        ({"input_ids": [1, 2], "attention_mask": [1, -1]}, "invalid_tokens", "'attention_mask' contains -1"),
        ({"input_ids": [1, True, 3]}, "invalid_tokens", "not a list of integers"),
        ({"input_ids": [1, 2], "labels": [True, 2]}, "invalid_tokens", "'labels' is [True, 2], not a list of integers"),
        ({"input_ids": [1, 2], "completion_mask": [1, 2]}, "invalid_tokens", "2 at token 1; it must be 0 or 1"),
        ({"input_ids": [1, 2], "loss_scale": [1, 1e30]}, "invalid_tokens", "a number from 0 to 10,000"),
        ({"input_ids": [1, 2], "loss_scale": [1, True]}, "invalid_tokens", "a number from 0 to 10,000"),
        ({"input_ids": [1, 2], "loss_scale": 3}, "invalid_tokens", "a number from 0 to 10,000"),
        ({"input_ids": [1, 2, 3], "channel": ["a", "b"]}, "invalid_tokens", "'channel' has 2 values for 1 samples"),
        (
            {"input_ids": [1], "seq_lengths": [2**62] * 3 + [2**62 + 1]},
            "invalid_tokens",
            "is 18,446,744,073,709,551,617",
        ),
        ({"input_ids": [1, START, PAD, END, 3]}, "media_tokens", "and no images"),
        ({"input_ids": [1, START, PAD, END, 3], "images": ["0.png"]}, "media_tokens", "need 2 (2)"),
        ({"input_ids": [1, PAD, 2, PAD, 3], "images": ["0.png"]}, "media_tokens", "in number or order"),
        ({"input_ids": [1, 2, 3], "images": ["gone.png"]}, "media_missing", ""),
    ],
)
def test_inconsistent_rows_are_dropped(
    import_rows: Imported, tmp_path: Path, row: dict[str, Any], reason: str, detail: str
) -> None:
    Image.new("RGB", (40, 60)).save(tmp_path / "0.png")
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({"input_ids": [1, 2]}) + "\n")
    samples, dropped, _ = import_rows(path)
    assert (len(samples), dropped) == (1, {reason: 1})
    (line,) = (tmp_path / "imported" / "dropped.jsonl").read_text().splitlines()
    assert detail in json.loads(line)["detail"]


def test_nulls_in_a_table_drop_only_their_rows(import_rows: Imported, tmp_path: Path) -> None:
    """Lists of numbers are read as arrays; one with a null in it is none."""
    columns = {"input_ids": [[1, 2, 3], None, [1, None, 3], [4, 5]], "labels": [[1, 2, 3], [1], [1, 2, 3], None]}
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(columns).to_parquet(str(path))
    samples, dropped, _ = import_rows(path)
    assert [sample.labels.tolist() for sample in samples] == [[1, 2, 3], [4, 5]]
    assert dropped == {"empty_tokens": 1, "invalid_tokens": 1}


def test_loss_weights_are_imported(import_rows: Imported, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3], "loss_scale": [0.0, 0.5, 1.0]}]
    (sample,), _, _ = import_rows(saved_dataset(rows, tmp_path / "prepared"))
    assert sample.loss_scale is not None
    assert sample.loss_scale.tolist() == [0, 0.5, 1]


def test_nemo_masks_are_shifted_to_their_targets(import_rows: Imported, tmp_path: Path) -> None:
    """A mask of 1 stands where the next token is a target; that of a sample's last token means nothing."""
    row = {"input_ids": [1, 2, 3, 4, 5, 6, 7], "loss_mask": [0, 1, 1, 0, 0, 1, 1], "seq_start_id": [0, 3]}
    path = tmp_path / "packed.idx.parquet"
    datasets.Dataset.from_list([row]).to_parquet(str(path))
    samples, dropped, notes = import_rows(path)
    assert not dropped
    assert [sample.input_ids.tolist() for sample in samples] == [[1, 2, 3], [4, 5, 6, 7]]
    assert [sample.labels.tolist() for sample in samples] == [[IGNORED, IGNORED, 3], [IGNORED, IGNORED, IGNORED, 7]]
    assert any("packed by NeMo or Megatron Bridge" in note for note in notes)


def test_loss_mask_column_is_configurable(import_rows: Imported, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]}) + "\n")
    (sample,), _, _ = import_rows(path, name="named", columns=("completion_mask=loss_mask",))
    assert sample.labels.tolist() == [IGNORED, 2, IGNORED]
    (sample,), _, _ = import_rows(path, name="left-out", columns=("loss_mask=",))
    assert sample.labels.tolist() == [1, 2, 3]


def test_padding_is_removed_on_both_sides(import_rows: Imported, tmp_path: Path) -> None:
    rows = [
        {
            "input_ids": [0, 0, 1, 2, 3, 0],
            "attention_mask": [0, 0, 1, 1, 1, 0],
            "labels": [IGNORED] * 3 + [2, 3, IGNORED],
        }
    ]
    (sample,), _, _ = import_rows(saved_dataset(rows, tmp_path / "prepared"))
    assert (sample.input_ids.tolist(), sample.labels.tolist()) == ([1, 2, 3], [IGNORED, 2, 3])


def test_text_rules_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved_dataset([{"input_ids": [1, 2, 3]}], tmp_path / "prepared")
    arguments = ["--model", str(model), "--max-length", "9", "--output-dir", str(tmp_path / "c")]
    assert run(["import", str(path), *arguments, "--loss-scale", "default+hermes"]) == 3
    assert "these rows are tokens" in capsys.readouterr().err


def test_max_length_defaults_to_that_of_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved_dataset([{"input_ids": [1, 2, 3]}], tmp_path / "prepared")
    arguments = ["import", str(path), "--output-dir", str(tmp_path / "c"), "--model"]
    assert run([*arguments, str(model)]) == 2
    assert "Give --max-length" in capsys.readouterr().err
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = {"model_type": "qwen3_vl", "text_config": {"max_position_embeddings": 64}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert run([*arguments, str(tmp_path)]) == 0
    assert json.loads((tmp_path / "c" / "packtool.json").read_text())["identity"]["spec"]["max_length"] == 64
