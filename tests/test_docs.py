"""The documentation is true: its commands run, its links lead somewhere, its generated pages are fresh."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import datasets
import pytest
import yaml

from packtool.cli.main import _SETTINGS
from packtool.cli.options import option_kinds
from packtool.demo.dataset import make_rows
from tests.cli.commands import run_here
from tests.cli.narrow_model import make_narrow_model
from tests.scripts.loading import SCRIPTS, load_script

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
# Blocks that begin so need what no test machine has, and say what.
_ELSEWHERE = "# needs "


def blocks(page: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)


def commands() -> list[str]:
    """Every packtool command of every page that can run here, in the order of the site, each once."""
    commands_in_docs = []
    for page in ["getting-started.md", *(page.name for page in PAGES)]:
        for block in blocks(DOCS / page):
            if not block.startswith(_ELSEWHERE):
                commands_in_docs += re.findall(r"^(?:[A-Z_]+=\S+ )*packtool (?:.*\\\n)*.+", block, re.MULTILINE)
    return list(dict.fromkeys(commands_in_docs))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    make_narrow_model(folder / "model")
    make_rows(str(folder), 16, 0)
    (folder / "train.json").rename(folder / "rows.json")
    (folder / "eval.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Which of these rows is held out?"}]}'
    )
    tokens = {"input_ids": [[5, 6, 7, 8]] * 3, "labels": [[-100, -100, 7, 8]] * 3, "attention_mask": [[1] * 4] * 3}
    datasets.Dataset.from_dict(tokens).save_to_disk(str(folder / "tokenized"))
    return folder


def test_every_command_runs(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several processes train is planned here, and trained in tests/test_readme.py and tests/train."""
    monkeypatch.chdir(world)
    for command in commands():
        trains_together = "NPROC_PER_NODE" in command and re.search("packtool (train|sft) ", command)
        run_here(f"{command} --dry-run" if trains_together and "--dry-run" not in command else command)


def test_every_recipe_is_accepted(
    world: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipes for GPUs, planned with a small model: whatever a run would refuse is refused."""
    monkeypatch.chdir(world)
    run_here("packtool export --model model --dataset rows.json --output-dir recipes --max-length 1024")
    sections = "\n".join(block for block in blocks(DOCS / "training.md") if block.startswith(_ELSEWHERE))
    recipes = re.findall(r"^(?:[A-Z_]+=\S+ )*packtool train (?:.*\\\n)*.+", sections, re.MULTILINE)
    assert len(recipes) >= 10
    for index, recipe in enumerate(recipes):
        small = re.sub(r"--model \S+", "--model model", recipe)
        small = re.sub(r"--cached-dataset \S+", "--cached-dataset recipes --max-length 1024", small)
        small = re.sub(r"--output-dir \S+", f"--output-dir recipe-{index}", small)
        run_here(small.replace("configs/", f"{repository}/configs/") + " --dry-run --hardware h100")
        assert "H100 SXM 80 GB, which has 74.5 GiB" in capsys.readouterr().err, recipe


def test_text_blocks_contain_no_commands() -> None:
    for page in (*PAGES, DOCS.parent / "README.md"):
        for block in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL):
            assert not re.search(r"^(?:[A-Z_]+=\S+ )*(packtool|sbatch|torchrun|scripts/\w+) ", block, re.MULTILINE), (
                page
            )


def test_unexecuted_blocks_state_their_requirements() -> None:
    for page in PAGES:
        for block in blocks(page):
            first_line = block.splitlines()[0]
            assert first_line.startswith((_ELSEWHERE, "packtool ", "scripts/")) or "=" in first_line.split()[0], (
                first_line
            )


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_resolves(repository: Path) -> None:
    for page in [*PAGES, repository / "README.md", repository / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in _anchors(file), f"{page.name}: {target}"


def test_every_named_option_exists() -> None:
    known = {name for settings in _SETTINGS.values() for name in option_kinds(settings)} | {
        "--help",
        "--version",
        "--install-completion",
    }
    foreign = {page for page in PAGES if page.name.startswith("from-")}
    for page in set(PAGES) - foreign:
        text = re.sub(r"^(sbatch|.*gpus-per-node).*$", "", page.read_text(), flags=re.MULTILINE)
        text = re.sub(r"`sbatch[^`]*`|(torchrun|accelerate launch) .*", "", text)
        for name in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)):
            assert name in known or name.replace("--no-", "--") in known, f"{page.name}: {name}"


def test_every_page_is_in_the_navigation(repository: Path) -> None:
    text = yaml.safe_dump(yaml.safe_load((repository / "mkdocs.yml").read_text())["nav"])
    assert set(re.findall(r"[\w-]+\.md", text)) == {page.name for page in PAGES}


def test_generated_pages_are_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", ["make_docs.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        load_script("make_docs").main()
    assert ended.value.code == 0


def test_option_details_name_existing_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    make_docs = load_script("make_docs")
    page = make_docs.options_page()
    lines = [line for line in make_docs.DETAILS.read_text().splitlines() if not line.startswith("#")]
    assert lines
    for option, commands, details in (line.split("\t") for line in lines):
        assert details.endswith("."), details
        # Words in other cells have other marks behind the name.
        assert details.replace("|", "\\|") in page, f"{option} is no option of {commands}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_have_a_title_and_text(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) > 10


def test_lines_are_short() -> None:
    """Text is wrapped; tables, links and commands may be longer."""
    for page in (*PAGES, *(DOCS.parent / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))):
        if page.name == "options.md" or page.name.startswith("from-"):
            continue
        for line_number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= 120 or line.startswith(("|", "{")), f"{page.name}:{line_number}: {len(line)}"
