"""Examples of other tools are read from checkouts, with their variables, and sorted into counted and excluded ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts._migration_examples import MARKERS, Example, commands, find_examples, project_of


def checkout(folder: Path, project: str, files: dict[str, str]) -> list[Example]:
    """Write a checkout with the marker of a project and return its examples."""
    for name, text in {MARKERS[project]: "", **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert project_of(folder) == project
    return find_examples(project, folder)


def test_shell_commands_have_variables_continuations_and_environment() -> None:
    script = """
    # two GPUs; it's a demo
    gpus=2
    model="Some/Model"
    CUDA_VISIBLE_DEVICES=0,1 \\
    SIZES="{\\"a\\": 1}" \\
    swift sft \\
        --model $model \\
        --dataset 'a#100' \\
                  'b c#5' \\
        --gradient_accumulation_steps $(expr 16 / $gpus) \\
        --save_steps $((4*gpus)) \\
        --system 'first

    #### last' > log.txt 2>&1 &
    """
    ((environ, words),) = commands(script)
    assert environ == {"CUDA_VISIBLE_DEVICES": "0,1", "SIZES": '{"a": 1}'}
    assert words[:4] == ("swift", "sft", "--model", "Some/Model")
    values = Example("ms-swift", "a.sh", words).option_values
    assert values["dataset"] == ["a#100", "b c#5"]
    assert (values["gradient_accumulation_steps"], values["save_steps"]) == (["8"], ["8"])
    assert values["system"] == ["first\n\n    #### last"]


@given(st.lists(st.lists(st.text("ab'\" $#=\\&;|", min_size=1), min_size=1, max_size=4), max_size=4))
def test_quoted_words_stay_as_they_are(lines: list[list[str]]) -> None:
    quoted = ["'" + "' '".join(word.replace("'", "'\"'\"'") for word in line) + "'" for line in lines]
    # A variable that is not set stays as it is, like every other character between quotes.
    read = [list(words) for _, words in commands("\n".join(f"program {line}" for line in quoted))]
    assert read == [["program", *line] for line in lines]


def test_ms_swift(tmp_path: Path) -> None:
    examples = checkout(
        tmp_path,
        "ms-swift",
        {
            "examples/train/a.sh": "swift export --model M --to_cached_dataset true\nMAX_PIXELS=9 swift sft --model M",
            "examples/train/b.sh": "torchrun --nproc_per_node=2 swift/cli/sft.py --model M",
            "examples/train/c.sh": "swift rlhf --model M\nmegatron sft --model M\nswift infer --model M",
            "examples/train/d.sh": "swift sft --model M --task_type embedding\nswift sft e.yaml\npip install x",
            "examples/export/f.sh": "swift export --model M --quant_bits 4",
            "examples/export/g.sh": "python evaluate.py",
            "e.yaml": "model: M",
        },
    )
    counted = {example.file: example for example in examples if not example.excluded}
    assert list(counted) == [f"examples/train/{name}" for name in ("a.sh", "a.sh#2", "b.sh", "d.sh#2")]
    assert counted["examples/train/a.sh#2"].environ == {"MAX_PIXELS": "9"}
    assert counted["examples/train/d.sh#2"].settings == {"model": "M"}
    reasons = {example.file.removeprefix("examples/"): example.excluded for example in examples if example.excluded}
    assert {file: reason.split(" ")[0] for file, reason in reasons.items()} == {
        "train/c.sh": "preference",
        "train/c.sh#2": "Megatron",
        "train/c.sh#3": "inference,",
        "train/d.sh": "trains",
        "export/f.sh": "converts",
        "export/g.sh": "no",
    }


def test_llama_factory(tmp_path: Path) -> None:
    examples = checkout(
        tmp_path,
        "LLaMA-Factory",
        {
            "examples/train_lora/a.yaml": "stage: sft\ndo_train: true",
            "examples/train_lora/b.yaml": "stage: dpo",
            "examples/train_lora/c.sh": "NAME=M\nllamafactory-cli train \\\n  --stage pt --model_name_or_path ${NAME}",
            "examples/extras/x/d.sh": "accelerate launch src/train.py examples/train_lora/a.yaml",
            "examples/extras/x/e.yaml": "stage: sft\ndo_predict: true",
            "examples/extras/x/f.yaml": "<a>: a token",
            "examples/inference/g.yaml": "stage: sft",
        },
    )
    counted = {example.file.rpartition("/")[2]: example for example in examples if not example.excluded}
    assert list(counted) == ["d.sh", "a.yaml", "c.sh"]
    assert counted["d.sh"].settings == counted["a.yaml"].settings == {"stage": "sft", "do_train": True}
    assert counted["c.sh"].option_values["model_name_or_path"] == ["M"]
    assert sum(bool(example.excluded) for example in examples) == 3


def test_axolotl(tmp_path: Path) -> None:
    examples = checkout(
        tmp_path,
        "axolotl",
        {
            "examples/m/a.yml": "base_model: M\nadapter: qlora",
            "examples/m/b.yaml": "base_model: M\nrl: dpo",
            "examples/m/c.yaml": "base_model: M\nnum_labels: 1",
            "examples/cloud/d.yaml": "gpu: a100",
        },
    )
    assert [example.file for example in examples if not example.excluded] == ["examples/m/a.yml"]
    assert len(examples) == 4


@pytest.mark.parametrize("block", ["```bash\n{}\n```", "- in a list\n\n  ```bash\n  {}\n  ```", "{}"])
def test_trl(tmp_path: Path, block: str) -> None:
    command = "python trl/scripts/sft.py \\\n    --model_name_or_path M \\\n    --dataset_name D  # a comment"
    examples = checkout(
        tmp_path,
        "TRL",
        {
            "docs/source/a.md": "Don't run [sft.py](link).\n\n" + block.format(command),
            "docs/source/b.md": "```yaml\nlr: 1\n```\nor\n```yaml\nlr: 2\n```\n"
            + block.format("trl sft --config c.yaml"),
            "docs/source/c.md": block.format("trl sft ... --packing"),
            "examples/scripts/sft_x.py": '"""Train.\n\n' + block.format("python examples/scripts/sft_x.py") + '\n"""\n',
        },
    )
    first, second, *excluded = examples
    assert first.option_values == {"model_name_or_path": ["M"], "dataset_name": ["D"]}
    assert (first.excluded, second.excluded, second.settings) == ("", "", {"lr": 2})
    assert [example.excluded.split(" ")[0] for example in excluded] == ["a", "its"]
