"""What ``--dataset`` can name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from packtool.config.data import ExportConfig
from packtool.errors import ConfigError, DataError, PacktoolError
from packtool.rows.forms import to_sample
from packtool.rows.forms.segments import prompt_format_name
from packtool.rows.read import scan, scan_sources
from packtool.rows.source import SourceSpec
from packtool.rows.sources import sources_of
from tests.rows.conftest import rows_of


def specs_of(*names: Any, **settings: Any) -> list[SourceSpec]:
    settings = {"output_dir": "o", **settings}
    config = ExportConfig(model="m", max_length=10, dataset=tuple(map(str, names)), **settings)
    return sources_of(config)


def paths_of(*names: Any, **settings: Any) -> list[str]:
    return [spec.path for spec in specs_of(*names, **settings)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of rows in folders, and others beside them."""
    names = ("b/1.jsonl", "b/2.csv.gz", "a.txt", "c.parquet", ".hidden/x.jsonl", "b/.y.jsonl", "p.png", "README.md")
    for name in names:
        path = tmp_path / "rows" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a"}\n')
    return tmp_path / "rows"


def test_files_folders_and_patterns(folder: Path) -> None:
    assert paths_of(folder / "b/1.jsonl", folder / "a.txt") == [f"{folder}/b/1.jsonl", f"{folder}/a.txt"]
    everything = [f"{folder}/{name}" for name in ("a.txt", "c.parquet", "b/1.jsonl", "b/2.csv.gz")]
    assert sorted(paths_of(folder)) == sorted(everything)
    assert paths_of(folder) == paths_of(folder)
    assert paths_of(folder / "*/*.jsonl") == [f"{folder}/b/1.jsonl"]
    assert paths_of(folder / "?") == [f"{folder}/b/1.jsonl", f"{folder}/b/2.csv.gz"]
    assert paths_of(f"file://{folder}/a.txt") == [f"{folder}/a.txt"]


def test_outputs_of_packtool_are_not_read_as_rows(folder: Path) -> None:
    """Output directories in a folder of rows, finished or not, neither by the folder nor by a pattern."""
    names = (folder, f"{folder}/**/*.*", f"{folder}/*", f"{folder}/*/*", f"{folder}/**")
    rows = {name: paths_of(name) for name in names}
    assert sorted(rows[f"{folder}/**"]) == sorted(rows[folder]), "each file once"
    written = {
        "here": ("dropped.jsonl", "train/data-00000-of-00001.arrow"),
        "finished": ("packtool.json", "dropped.jsonl", "val/index.arrow"),
        "b/unfinished": (".tasks/export.json", "train/data-00000-of-00001.arrow"),
        "b/run": ("history/run.json", "metrics.jsonl", "checkpoint-1/config.json"),
    }
    for directory, files in written.items():
        for name in files:
            path = folder / directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    assert {name: paths_of(name, output_dir=str(folder / "here")) for name in names} == rows
    assert paths_of(folder / "finished" / "dropped.jsonl"), "a file that is named is read"


def test_a_directory_of_packs_is_its_files(tmp_path: Path) -> None:
    files = [{"file": "packs-00000-of-00001.tar"}, {"file": "../../etc/rows.jsonl"}]
    (tmp_path / "packs.json").write_text(json.dumps({"files": files}))
    assert paths_of(tmp_path) == [str(tmp_path / "packs-00000-of-00001.tar"), str(tmp_path / "rows.jsonl")]
    (tmp_path / "packs-00000-of-00001.tar").touch()
    assert paths_of(f"{tmp_path}/pack*") == [str(tmp_path / "packs-00000-of-00001.tar")]
    (tmp_path / "packs.json").write_text("{}")
    with pytest.raises(DataError, match="lists no files of packs"):
        paths_of(tmp_path)


def test_samples_and_files_with_a_number_sign(folder: Path) -> None:
    (spec,) = specs_of(f"{folder}/a.txt#1000")
    assert (spec.path, spec.num_sampled, spec.name) == (f"{folder}/a.txt", 1000, f"{folder}/a.txt#1000")
    (folder / "a.txt#7").write_text("x")
    (folder / "odd#5.txt").write_text("x")
    assert specs_of(f"{folder}/odd#5.txt")[0].num_sampled is None
    (spec,) = specs_of(f"{folder}/odd#5.txt#3")
    assert (spec.path, spec.num_sampled) == (f"{folder}/odd#5.txt", 3)
    first_spec, *_ = both = specs_of(f"{folder}/b#10", f"{folder}/a.txt")
    assert [(spec.group, spec.num_sampled) for spec in both] == [(0, 10), (0, 10), (1, None)]
    assert json.loads(first_spec.settings) == {"num_sampled": 10}
    shares = [specs_of(f"{folder}/a.txt#{amount}")[0].times_sampled for amount in ("20%", "2.5x")]
    assert shares == [0.2, 2.5]
    with pytest.raises(ConfigError, match="#0 takes nothing"):
        specs_of(f"{folder}/a.txt#0")


def test_a_file_whose_name_ends_like_a_sample_wins(folder: Path) -> None:
    (folder / "a.txt#7").write_text("x")
    (spec,) = specs_of(f"{folder}/a.txt#7")
    assert (spec.path, spec.num_sampled) == (f"{folder}/a.txt#7", None)


def test_rows_for_the_val_split(folder: Path) -> None:
    specs = specs_of(folder / "a.txt", val_dataset=(str(folder / "b"), f"{folder}/a.txt#2"))
    assert [(spec.split, spec.group) for spec in specs] == [("train", 0), ("val", 1), ("val", 1), ("val", 2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{}/gone.jsonl", "--dataset .*/gone.jsonl: there is no such file"),
        ("{}/*.xml", "no file of rows matches\nSupported are .json, "),
        ("{}/p.png", "unknown file format\nSupported are"),
        ("{}/pictures", "the folder has no files of rows; it contains p.png, q.png"),
        ("{}/cache", "is a cache written by packtool export"),
        ("{}/dict", "has no split train; its splits are a, b"),
    ],
)
def test_missing_sources_are_named(folder: Path, name: str, message: str) -> None:
    for inner in ("pictures/p.png", "pictures/q.png", "cache/packtool.json"):
        (folder / inner).parent.mkdir(exist_ok=True)
        (folder / inner).touch()
    (folder / "dict").mkdir()
    (folder / "dict" / "dataset_dict.json").write_text('{"splits": ["a", "b"]}')
    with pytest.raises(DataError, match=message):
        scan_sources(specs_of(name.format(folder)), 42)


def test_saved_datasets(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"question": [f"q{i}" for i in range(90)], "answer": ["a"] * 90})
    data.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict(train=data, test=data.select(range(5))).save_to_disk(str(tmp_path / "many"))
    datasets.DatasetDict(test=data.select(range(5))).save_to_disk(str(tmp_path / "test"))
    for name, count in (("one", 90), ("many", 90), ("many/test", 5), ("test", 5)):
        result = scan_sources(specs_of(tmp_path / name), 42)
        rows = [row for source in result for _, row in rows_of(source)]
        assert rows == [{"question": f"q{i}", "answer": "a"} for i in range(count)]
        assert result[0].source.form == "query"
    (tmp_path / "one" / "more.jsonl").write_text('{"text": "a"}')
    assert len(specs_of(tmp_path)) == 6  # what datasets wrote about the rows is no row


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that ``datasets`` takes for the hub's, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "owner" / "set").mkdir(parents=True)
    (tmp_path / "owner" / "set" / "train.jsonl").write_text('{"query": "q", "response": "a"}\n' * 3)
    (tmp_path / "owner" / "set" / "test.jsonl").write_text('{"query": "r", "response": "b"}\n' * 2)


@pytest.mark.usefixtures("hub")
def test_hub_datasets_are_read() -> None:
    for name, rows in (("hf::owner/set", 3), ("hf::owner/set:default", 3), ("hf::owner/set:default:test#1", 1)):
        result = scan_sources(specs_of(name), 42)
        assert sum(source.num_rows for source in result) == rows
        assert result[0].source.form == "query"
    with pytest.raises(DataError, match=r"split dev\) cannot be loaded: ValueError: Unknown split"):
        specs_of("hf::owner/set::dev")


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing:sub:test#5", "hf::nothing"])
def test_unreachable_hub_is_an_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"there is no such file, and the Hugging Face dataset no.* cannot be loaded: .*\n.*HF_HUB"
    ):
        specs_of(name)


def info_file(folder: Path, **sets: Any) -> str:
    (folder / "dataset_info.json").write_text(json.dumps(sets))
    return str(folder / "dataset_info.json")


def test_named_datasets_are_read(folder: Path, tmp_path: Path) -> None:
    (folder / "alpaca.jsonl").write_text('{"ask": "q", "input": "never read", "say": "a"}\n')
    (folder / "talk.json").write_text('[{"chat": [{"who": "me", "what": "q"}, {"who": "it", "what": "a"}]}]')
    info = info_file(
        folder,
        texts={"file_name": "a.txt", "loss_scale": "last_round", "num_samples": 3},
        alpaca={"file_name": "alpaca.jsonl", "columns": {"prompt": "ask", "response": "say", "system": "sys"}},
        talk={
            "file_name": "talk.json",
            "formatting": "sharegpt",
            "columns": {"messages": "chat"},
            "tags": {"role_tag": "who", "content_tag": "what", "user_tag": "me", "assistant_tag": "it"},
        },
        all={"file_name": "b"},
    )
    (spec,) = specs_of("texts", dataset_info=info)
    assert (spec.path, spec.loss_scale, spec.num_sampled) == (f"{folder}/a.txt", "last_round", 3)
    assert specs_of("texts#9", dataset_info=info)[0].num_sampled == 9
    assert len(specs_of("all", "texts", str(folder / "a.txt"), dataset_info=info)) == 4
    scanned = scan(specs_of("talk", dataset_info=info)[0])
    ((_, row),) = rows_of(scanned)
    assert [(turn.role, turn.content) for turn in to_sample(row, scanned.source, 0).turns] == [
        ("user", "q"),
        ("assistant", "a"),
    ]
    with pytest.raises(DataError, match="has no column 'sys' in its first rows; did"):
        scan(specs_of("alpaca", dataset_info=info)[0])
    info = info_file(folder, alpaca={"file_name": "alpaca.jsonl", "columns": {"prompt": "ask", "response": "say"}})
    alpaca = scan(specs_of("alpaca", dataset_info=info)[0])
    ((_, row),) = rows_of(alpaca)
    assert [turn.content for turn in to_sample(row, alpaca.source, 0).turns] == ["q", "a"]


@pytest.mark.usefixtures("hub")
def test_named_hub_datasets_are_read(tmp_path: Path) -> None:
    info = info_file(tmp_path, far={"hf_hub_url": "owner/set", "split": "test"})
    (result,) = scan_sources(specs_of("far", dataset_info=info), 42)
    assert result.num_rows == 2


@pytest.mark.usefixtures("hub")
def test_folder_selects_part_of_a_dataset(tmp_path: Path) -> None:
    """LLaMA-Factory's ``folder``, of a set of the hub and of a local directory; never the whole set instead."""
    inside = tmp_path / "owner" / "set" / "python"
    inside.mkdir()
    (inside / "train.jsonl").write_text('{"query": "p", "response": "a"}\n' * 5)

    def rows(**entry: Any) -> int:
        result = scan_sources(specs_of("far", dataset_info=info_file(tmp_path, far=entry)), 42)
        return sum(source.num_rows for source in result)

    far = {"hf_hub_url": "owner/set"}
    assert (rows(**far, folder="python"), rows(**far)) == (5, 8)
    near = {"file_name": "owner/set"}
    assert (rows(**near, folder="python"), rows(**near)) == (5, 10)
    # Of several places the hub's is the one that LLaMA-Factory reads.
    assert rows(**far, file_name="owner/set/test.jsonl", folder="python") == 5
    with pytest.raises(DataError, match=r"split train, folder java\) cannot be loaded"):
        rows(**far, folder="java")
    with pytest.raises(DataError, match="set/java: there is no such file"):
        rows(**near, folder="java")
    with pytest.raises(DataError, match=r"the folder 'python', but .*train.jsonl is not a directory"):
        rows(file_name="owner/set/train.jsonl", folder="python")


@pytest.mark.usefixtures("hub")
def test_modelscope_datasets_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ms_hub_url`` alone, and beside ``hf_hub_url`` with ``--use-hf false``."""
    names = []

    def copy(option: str, function: str, name: str) -> str:
        assert function == "dataset_snapshot_download"
        names.append(name)
        return str(tmp_path / "owner" / "set")

    monkeypatch.setattr("packtool.rows.sources.download", copy)
    both = {"hf_hub_url": "nobody/nothing", "ms_hub_url": "team/set", "split": "test"}
    for entry, use_hf in (({"ms_hub_url": "team/set", "split": "test"}, None), (both, False)):
        info = info_file(tmp_path, far=entry)
        (result,) = scan_sources(specs_of("far", dataset_info=info, use_hf=use_hf), 42)
        assert result.num_rows == 2
    assert names == ["team/set"] * 2


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"file_nam": "a"}, r"key 'file_nam'; did you mean 'file_name'\?\n.*needs one of file_name, cloud"),
        ({"file_name": "a", "columns": {"promt": "x"}}, "'s', columns: unknown key 'promt'; did you mean 'prompt'"),
        ({"file_name": "a", "tags": {"user": "x"}}, "'s', tags: unknown key 'user'"),
        ({"file_name": "a", "ranking": True}, "preference data is not supported"),
        ({"file_name": "a", "formatting": "chatml"}, "it must be alpaca, sharegpt or openai"),
        ({"file_name": "a", "xyz": 1}, "dataset_info.json: 's': unknown key 'xyz'; known keys are hf_.*loss_scale"),
        ({"file_name": "a", "columns": {"kto_tag": "x"}}, "the columns kto_tag: preference data"),
        ({"script_url": "a", "file_name": "b"}, "script_url: loading scripts are not supported"),
        ({"om_hub_url": "a"}, "om_hub_url: the openMind hub is not supported"),
        ({"file_name": "a", "split": "test"}, "split 'test', which is only for .* hub; remove split and set file_name"),
        ({"cloud_file_name": "s3://a/b", "subset": "en"}, "subset 'en', .* remove subset and set cloud_file_name"),
        ({"hf_hub_url": "a/b", "folder": "../c"}, "folder '../c': it must be a sub-directory"),
        ({"hf_hub_url": "a/b", "folder": "/c"}, "folder '/c': it must be a sub-directory"),
        ({"file_name": 5}, "file_name is 5, not text"),
        ({"file_name": "a", "num_samples": 0}, "num_samples is 0"),
        ({"file_name": "a", "columns": {"messages": 1}}, "columns must be an object whose values are text"),
        ("a.json", "'s' is a str, not an object"),
    ],
)  # fmt: skip
def test_invalid_named_datasets_are_refused(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        specs_of("s", dataset_info=info_file(tmp_path, s=entry))


def test_dataset_info_may_be_given_as_its_directory(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    info_file(tmp_path, texts={"file_name": "a.txt"})
    (spec,) = specs_of("texts", dataset_info=str(tmp_path))
    assert spec.path == str(tmp_path / "a.txt")


def test_a_bare_name_is_answered_with_dataset_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"there is no such file\n.*add --dataset-info DIR"):
        specs_of("identity")


def test_unknown_dataset_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"--dataset txts: there is no such file.*did you mean 'texts'"):
        specs_of("txts", dataset_info=info_file(tmp_path, texts={"file_name": "a.txt"}))
    (tmp_path / "dataset_info.json").write_text("[")
    with pytest.raises(ConfigError, match="not JSON"):
        specs_of("txts", dataset_info=str(tmp_path / "dataset_info.json"))


@pytest.mark.parametrize(
    "columns",
    [
        ("query=title", "response=body"),
        ('{"query": "title", "response": "body"}',),
        ("{'title': 'query', 'body': 'response'}",),
    ],
)
def test_columns(tmp_path: Path, columns: tuple[str, ...]) -> None:
    (tmp_path / "rows.csv").write_text("title,body,text\nq,a,t\n")
    (spec,) = specs_of(tmp_path / "rows.csv", columns=columns, system="s", media_root="/media")
    result = scan(spec)
    ((_, row),) = rows_of(result)
    sample = to_sample(row, result.source, 0)
    assert [turn.content for turn in sample.turns] == ["s", "q", "a"]
    assert set(json.loads(spec.settings)) == {"columns", "system", "media_root"}


@pytest.mark.parametrize("value", ["alpaca:chat", "plain", "Q: {instruction}\nA: "])
def test_prompt_format(tmp_path: Path, value: str) -> None:
    """The option applies to all sources, except those whose entry in ``--dataset-info`` has its own format."""
    (tmp_path / "rows.jsonl").write_text('{"query": "q", "response": "a"}\n')
    (tmp_path / "dataset_info.json").write_text(
        '{"own": {"file_name": "rows.jsonl", "prompt_format": "{instruction}!"}, "other": {"file_name": "rows.jsonl"}}'
    )
    named = {"dataset_info": str(tmp_path), "prompt_format": value}
    spec, own, other = (specs_of(name, **named)[0] for name in (tmp_path / "rows.jsonl", "own", "other"))
    assert prompt_format_name(spec.prompt_format) == value
    assert other.prompt_format == spec.prompt_format
    assert own.prompt_format == ("{instruction}!",)
    result = scan(spec)
    ((_, row),) = rows_of(result)
    question, answer = to_sample(row, result.source, 0).turns
    assert (question.content, answer.content) == (spec.prompt_format[-1].replace("{instruction}", "q"), "a")


@pytest.mark.parametrize("value", ["alpaka", "{input}"])
def test_invalid_prompt_format_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-format '.*' must contain {instruction} or be one of alpaca"):
        specs_of(tmp_path, prompt_format=value)


@pytest.mark.parametrize("columns", ["query", "=x", "{'a': 1}", "{query"])
def test_invalid_columns_are_refused(tmp_path: Path, columns: str) -> None:
    with pytest.raises(ConfigError, match="--columns"):
        specs_of(tmp_path, columns=(columns,))


def test_form_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(PacktoolError, match=r"rows.jsonl: the rows have no known form; their keys are: id\n"):
        scan_sources(specs_of(tmp_path / "rows.jsonl"), 42)


def test_output_of_an_empty_export_is_not_read_as_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    (rows / "out").mkdir(parents=True)
    (rows / "a.jsonl").write_text('{"query": "q", "response": "a"}\n')
    (rows / "out" / "dropped.jsonl").write_text('{"source": "a", "row": 0, "reason": "no_turns", "detail": ""}\n')
    config = ExportConfig(model="m", dataset=(str(rows),), output_dir=str(tmp_path / "cache"), max_length=9)
    assert [spec.path for spec in sources_of(config)] == [str(rows / "a.jsonl")]


@pytest.mark.parametrize(
    ("amount", "kept"), [("first3", 3), ("first100", 5), ("first40%", 2), ("first1", 1), ("first4", 4)]
)
def test_first_rows_of_an_argument(amount: str, kept: int, tmp_path: Path) -> None:
    """They are taken in the order of the files, and never repeated."""
    texts = [f"text {number}" for number in range(5)]
    for name, part in (("a", texts[:2]), ("b", texts[2:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    sources = scan_sources(specs_of(f"{tmp_path}/*.jsonl#{amount}"), 0)
    rows = [row for source in sources for _, row in rows_of(source)]
    assert [row["text"] for row in rows] == texts[:kept]
