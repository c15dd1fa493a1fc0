"""Every drop reason, error and exit has a code, which keeps its meaning forever."""

from __future__ import annotations

import ast
import json
import pickle
import re
from pathlib import Path

import pytest

import packtool
from packtool import errors
from packtool.cache.manifest import Manifest
from packtool.cli.main import run
from packtool.config.codes import INTERNAL_ERROR, code_of_error, codes
from packtool.encode.model_files import ModelFiles
from packtool.rows.sample import DROP_REASONS, UNEXPECTED

ROOT = Path(packtool.__file__).parent
_ERRORS = {name: cls for name, cls in vars(errors).items() if name.endswith("Error") and isinstance(cls, type)}
# Their codes come from the row's reason, and from the signal.
_OTHER_CODES = {"RowError", "StoppedError"}


def raise_sites() -> set[tuple[str, str]]:
    """Return (class, module) of all places that make an error without naming its code."""
    sites = set()
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and not any(keyword.arg == "code" for keyword in call.keywords):
                name = ast.unparse(call.func).partition(".from_problems")[0].removeprefix("errors.")
                if name in _ERRORS.keys() - _OTHER_CODES and module != "errors":
                    sites.add((name, module))
    return sites


def test_every_error_has_a_code() -> None:
    sites = raise_sites()
    assert len(sites) > 150
    missing = {
        site
        for site in sites
        if code_of_error(tuple(cls.__name__ for cls in _ERRORS[site[0]].__mro__), site[1]) == INTERNAL_ERROR
    }
    assert missing == set()


def test_every_code_of_an_error_is_used() -> None:
    used = {code_of_error((name,), module) for name, module in raise_sites()}
    used |= set(re.findall(r'code="(\w+)"', "".join(path.read_text() for path in ROOT.rglob("*.py"))))
    active = {code for code, row in codes().items() if not row.meaning.startswith("Retired")}
    assert {code for code in active if code[0] not in "RE"} <= used
    assert {row.name for row in codes().values() if row.code in active and row.code.startswith("R")} <= set(
        DROP_REASONS
    )


def test_every_exit_has_a_code() -> None:
    exits = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {f"E{number:03}" for number in exits} <= codes().keys()


@pytest.mark.smoke
def test_codes_and_names_are_unique_and_described() -> None:
    lines = (ROOT / "config" / "codes.tsv").read_text().splitlines()
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    assert len({row[0] for row in rows}) == len({row[1] for row in rows}) == len(rows)
    for code, name, _, meaning, example, remedy in rows:
        assert re.fullmatch(r"[A-Z]\d{3}", code)
        assert re.fullmatch(r"[a-z_0-9]+", name)
        assert meaning.endswith("."), code
        assert remedy.endswith("."), code
        assert example


def test_published_codes_keep_their_names() -> None:
    """A code that was published is never removed and never gets another meaning; new ones are added to the list."""
    published = (Path(__file__).parent / "codes.txt").read_text().split("\n")[:-1]
    assert [f"{row.code} {row.name}" for row in codes().values()] == published


def test_errors_know_their_codes(tmp_path: Path) -> None:
    with pytest.raises(errors.MismatchError) as not_a_cache:
        Manifest.read(str(tmp_path))
    assert not_a_cache.value.code == "C002"
    with pytest.raises(errors.ConfigError) as no_model:
        ModelFiles.load(str(tmp_path / "model"))
    assert no_model.value.code == "M001"
    assert errors.RowError("a", 0, "media_missing", "").code == "R002"
    assert errors.StoppedError("", signal=15).code == "E143"
    assert pickle.loads(pickle.dumps(no_model.value)).code == "M001"


def test_several_errors_have_their_common_code() -> None:
    def refuse(code: str) -> None:
        raise errors.ConfigError("wrong", code=code)

    for code, other, expected in (("M001", "M001", "M001"), ("M001", "O003", "O002")):
        with pytest.raises(errors.ConfigError) as error:
            errors.raise_together([lambda: refuse(code), lambda: refuse(other)])  # noqa: B023
        assert error.value.code == expected


def test_messages_end_their_first_line_with_the_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(tmp_path)]) == errors.EXIT_MISMATCH
    assert capsys.readouterr().err.splitlines()[0].endswith(" [C002]")
    assert run(["inspect", "--rwo", "1"]) == errors.EXIT_USAGE
    assert capsys.readouterr().err.splitlines()[0].endswith(" [O001]")


def test_explain_prints_a_code_by_number_and_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("R002", "[r002]", "media_missing"):
        assert run(["explain", word]) == 0
        text = capsys.readouterr().out
        assert text.startswith("R002 media_missing\n")
        assert DROP_REASONS["media_missing"] in text
    assert run(["explain", UNEXPECTED, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"code", "name", "meaning", "example", "remedy"}


def test_explain_lists_all_codes_and_suggests_similar_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(codes())
    assert run(["explain", "media_mising"]) == errors.EXIT_USAGE
    assert "did you mean 'media_missing'?" in capsys.readouterr().err
