#!/usr/bin/env python3
"""Train the same model on the same rows with packtool and with other tools, and compare every optimizer step.

Two examples are trained in float32 on the CPU with full fine-tuning and AdamW: conversations of one and two turns with
a small random Qwen3, and conversations about pictures with a small random Qwen3-VL. Both models have the real tokenizer
and chat template. All tools read the rows in the same order. Each run is recorded by ``_compare_recorder.py`` in the
tool's own interpreter.

If losses differ for a known reason, they are compared a second time: packtool also trains the line breaks after
``<|im_end|>`` (``train_newline``) and gets the tool's system prompt if the tool does; the tool has one micro-batch per
step if losses still differ. With ``--repeats``, both train the first steps alternately, and the times are those of
these runs. ``--packed`` prints a second table: how much the losses of the tool's packs differ from those of their
samples alone.

    python scripts/compare_tools.py --trl-python PYTHON --swift-python PYTHON [--llama-factory-python PYTHON]
        [--axolotl-python PYTHON] [--examples text picture] [--realdata DIR] [--work DIR]

The script prints a Markdown table with one line per tool and example, and one per step below it with ``--every-step``.
Times are only meaningful as ratios. The real data (conversations, pictures, tokenizers) is not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from scripts._compare_recorder import (
    ARGUMENTS,
    MAX_LENGTH,
    PACKING,
    Example,
    packtool_arguments,
    with_options,
    words,
)
from scripts._reduced_model import cut_tokenizer

ROOT = Path(__file__).resolve().parent.parent
RECORDER = Path(__file__).with_name("_compare_recorder.py")
REALDATA = ROOT.parent / "shared" / "realdata"
NUM_ROWS = 48
# A line break, which ms-swift and LLaMA-Factory train after every answer.
LINE_BREAK = 198
VOCABULARY = 8192
MAX_LOSS_DIFFERENCE = 1e-4
# Steps of a run with ``--repeats``; the first is not measured.
NUM_TIMED_STEPS = 4
# The system prompt that the template of a tool adds, by tool and example.
SYSTEM_PROMPTS = {("axolotl", "picture"): "You are a helpful assistant."}
TOOLS = {"trl": "TRL", "ms-swift": "ms-swift", "llama-factory": "LLaMA-Factory", "axolotl": "axolotl"}


@dataclass(frozen=True)
class Comparison:
    """Differences between the records of a tool and of packtool.

    Args:
        equal_samples: steps with the same token ids in the same samples, in any order within the step.
        tokens: of all steps, of the tool and of packtool.
        targets: target tokens of all steps, of the tool and of packtool.
        extra: ids that only the tool trains, with their counts; negative where only packtool does.
        rate, loss: largest absolute difference of a step's learning rate and loss.
        norm: largest relative difference of a step's gradient norm.
        time: the tool's median step time divided by packtool's.
    """

    num_steps: int
    equal_samples: int
    tokens: tuple[int, int]
    targets: tuple[int, int]
    extra: Mapping[int, int]
    rate: float
    loss: float
    norm: float
    time: float


def extra_targets(tool: Sequence[Any], packtool: Sequence[Any]) -> Counter[int]:
    """Count the target ids that only the tool has in samples with equal ids; negative for those only packtool has."""
    extra: Counter[int] = Counter()
    for (ids, targets), (other_ids, other_targets) in zip(tool, packtool, strict=False):
        if ids == other_ids:
            extra.update(ids[place] for place in set(targets) - set(other_targets))
            extra.subtract(Counter(ids[place] for place in set(other_targets) - set(targets)))
    return Counter({token: count for token, count in extra.items() if count})


def in_order(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step with its samples sorted by their ids: packtool batches samples of similar length together."""
    return {**step, "samples": sorted(step["samples"])}


def compare(tool: Sequence[Mapping[str, Any]], packtool: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare two records of steps.

    Raises:
        SystemExit: the numbers of steps differ.
    """
    if len(tool) != len(packtool):
        raise SystemExit(
            f"the tool has trained {len(tool)} steps and packtool {len(packtool)}: give both the same rows"
        )
    pairs = [(in_order(left), in_order(right)) for left, right in zip(tool, packtool, strict=True)]
    extra: Counter[int] = Counter()
    for left, right in pairs:
        for token, count in extra_targets(left["samples"], right["samples"]).items():
            extra[token] += count

    def total(steps: Sequence[Mapping[str, Any]], part: int) -> int:
        return sum(len(sample[part]) for step in steps for sample in step["samples"])

    def largest(name: str) -> float:
        return max(abs(left[name] - right[name]) for left, right in pairs)

    def seconds(steps: Sequence[Mapping[str, Any]]) -> float:
        return statistics.median(step["seconds"] for step in steps)

    same = ([ids for ids, _ in left["samples"]] == [ids for ids, _ in right["samples"]] for left, right in pairs)
    return Comparison(
        num_steps=len(pairs),
        equal_samples=sum(same),
        tokens=(total(tool, 0), total(packtool, 0)),
        targets=(total(tool, 1), total(packtool, 1)),
        extra=extra,
        rate=largest("learning_rate"),
        loss=largest("loss"),
        norm=max(abs(left["grad_norm"] / right["grad_norm"] - 1) for left, right in pairs),
        time=seconds(tool) / seconds(packtool),
    )


def cut_vocabulary(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the tokenizer to ``VOCABULARY`` tokens, and return the configuration with the new ids."""
    new_ids = cut_tokenizer(folder, VOCABULARY)

    def renumber(part: Mapping[str, Any]) -> dict[str, Any]:
        ids = {name: new_ids[old] for name, old in part.items() if name.endswith("_token_id") and old in new_ids}
        return {**part, **ids} | ({"vocab_size": VOCABULARY} if "vocab_size" in part else {})

    text = {"text_config": renumber(config["text_config"])} if "text_config" in config else {}
    return renumber(config) | text


def make_model(folder: Path, realdata: Path, has_pictures: bool, small_vocabulary: bool) -> None:
    """Save a small random Qwen3 or Qwen3-VL in float32 with the real tokenizer, processor and chat template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    source = realdata / "tokenizers" / "qwen3-vl"
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    config = json.loads((source / "config.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "dtype": "float32"}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    text = config["text_config"] | small
    if has_pictures:
        text["rope_scaling"]["mrope_section"] = [6, 5, 5]
        vision = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64}
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 256}
        config |= {"text_config": text, "vision_config": config["vision_config"] | vision, "dtype": "float32"}
        if small_vocabulary:
            config = cut_vocabulary(folder, config)
    else:
        text.pop("rope_scaling")
        config = text | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "pad_token_id": 151643}
        template = (realdata / "tokenizers" / "text-qwen3_instruct_2507.jinja").read_text()
        (folder / "chat_template.jinja").write_text(template)
        for path in folder.glob("*preprocessor_config.json"):
            path.unlink()
        config = cut_vocabulary(folder, config)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if has_pictures else AutoModelForCausalLM
    auto.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)


def with_marks(template: str) -> str:
    """Mark the assistant's turns in Qwen3's text template, as TRL's ``assistant_only_loss`` requires."""
    opening, ending = "{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- '<|im_end|>\\n' }}"
    head, tail = template.split(opening, 1)
    body, tail = tail.split(ending, 1)
    opening = opening.replace(" + content }}", " }}{%- generation %}{{- content }}")
    return head + opening + body + "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}" + tail


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def text_rows(realdata: Path) -> list[dict[str, Any]]:
    """Return conversations of gsm8k; every third has two turns."""
    with (realdata / "text_gsm8k_test.jsonl").open() as lines:
        messages = [json.loads(next(lines))["messages"] for _ in range(2 * NUM_ROWS)]
    return [{"messages": messages[2 * i] + (messages[2 * i + 1] if i % 3 == 0 else [])} for i in range(NUM_ROWS)]


def picture_rows(realdata: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the shortest single-turn rows of MATH-V and write their pictures, at most 320 pixels wide or high."""
    from PIL import Image

    rows = [json.loads(line) for line in (realdata / "mm_mathvision_a.jsonl").open()]
    rows = [row for row in rows if len(row["messages"]) == 2 and row["messages"][0]["content"].startswith("<image>")]
    rows.sort(key=lambda row: len(row["messages"][1]["content"]))
    chosen = []
    for number, row in enumerate(row for row in rows[NUM_ROWS : 4 * NUM_ROWS : 3] if len(row["images"]) == 1):
        path = folder / f"{number}.png"
        with Image.open(realdata / row["images"][0]) as picture:
            picture = picture.convert("RGB")
            picture.thumbnail((320, 320))
            picture.save(path)
        chosen.append({"messages": row["messages"], "images": [str(path)]})
    return chosen


def make_example(name: str, folder: Path, realdata: Path, small_vocabulary: bool) -> Example:
    """Write the model and the rows of an example, in the format of each tool."""
    folder.mkdir(parents=True)
    example = Example(name, folder)
    make_model(example.model, realdata, example.has_pictures, small_vocabulary)
    if not example.has_pictures:
        write_lines(example.rows, text_rows(realdata))
        example.marked_template.write_text(with_marks((example.model / "chat_template.jinja").read_text()))
        return example
    rows = picture_rows(realdata, folder)
    write_lines(example.rows, rows)
    prompts, parts = [], []
    for row in rows:
        question, answer = (turn["content"].removeprefix("<image>") for turn in row["messages"])
        text = [{"type": "text", "text": question}]
        asking, answering = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        prompts.append({"prompt": [asking], "completion": [answering], "images": row["images"]})
        content = [{"type": "image", "path": row["images"][0]}, *text]
        answers = [{"type": "text", "text": answer}]
        parts.append({"messages": [asking | {"content": content}, answering | {"content": answers}]})
    write_lines(example.prompts, prompts)
    write_lines(example.parts, parts)
    return example


def record(python: str, tool: str, arguments: Any, folder: Path) -> dict[str, Any]:
    """Run a tool in its interpreter and return its record; the output is in ``folder/output.txt``."""
    folder.mkdir(parents=True)
    settings, result = folder / "settings.json", folder / "record.json"
    settings.write_text(json.dumps({"tool": tool, "arguments": arguments}))
    hidden = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    hidden |= {"HF_HOME": str(folder / "hf"), "WANDB_DISABLED": "true", "AXOLOTL_DO_NOT_TRACK": "1"}
    hidden["IMAGE_MIN_TOKEN_NUM"] = "64"  # the processor's own minimum, which ms-swift ignores
    with (folder / "output.txt").open("w") as output:
        command = [python, str(RECORDER), str(settings), str(result)]
        done = subprocess.run(command, cwd=folder, env=os.environ | hidden, stdout=output, stderr=subprocess.STDOUT)
    if done.returncode or not result.exists():
        tail = "\n".join((folder / "output.txt").read_text().splitlines()[-25:])
        raise SystemExit(f"{tool} has failed; the end of {folder / 'output.txt'}:\n{tail}")
    loaded: dict[str, Any] = json.loads(result.read_text())
    return loaded


def run_packtool(example: Example, folder: Path, loss_scale: str = "default", system: str = "") -> Sequence[Any]:
    """Export the rows, train on the cache, and return the recorded steps."""
    cache = folder / "cache"
    folder.mkdir()
    export = {"model": example.model, "dataset": example.rows, "output-dir": cache, "max-length": MAX_LENGTH}
    export |= {"loss-scale": loss_scale} | ({"system": system} if system else {})
    command = [sys.executable, "-m", "packtool", "export", "--strict", *words(export)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    arguments = packtool_arguments(example, cache, folder / "run")
    steps: Sequence[Any] = record(sys.executable, "packtool", arguments, folder / "train")["steps"]
    return steps


HEADER = (
    "tool", "example", "steps with the same samples", "tokens", "targets", "extra targets", "learning rate", "loss",
    "loss, second run", "gradient norm", "time",
)  # fmt: skip


def summary_line(
    title: str, example: str, result: Comparison, repeated_result: Comparison, names: Callable[[int], str]
) -> str:
    """Return a line of the table; ``names`` gives the text of a token id."""
    extra = ", ".join(f"{count:+d} {json.dumps(names(token))}" for token, count in result.extra.items()) or "none"
    cells = [title, example, f"{result.equal_samples} of {result.num_steps}"]
    cells += [f"{result.tokens[0]:,} / {result.tokens[1]:,}", f"{result.targets[0]:,} / {result.targets[1]:,}", extra]
    cells += [f"{value:.1e}" for value in (result.rate, result.loss, repeated_result.loss)]
    return "| " + " | ".join([*cells, f"{result.norm:.2%}", f"{result.time:.1f}"]) + " |"


def step_lines(tool: Sequence[Mapping[str, Any]], packtool: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of single steps, each cell with the tool's value and packtool's."""
    lines = ["", "| step | samples | tokens | targets | learning rate | loss | seconds |", "|" + "---|" * 7]
    for number, steps in enumerate(zip(tool, packtool, strict=True), start=1):
        values = [[str(len(step["samples"])) for step in steps]]
        values += [[str(sum(len(sample[part]) for sample in step["samples"])) for step in steps] for part in (0, 1)]
        values += [[f"{step[name]:.6g}" for step in steps] for name in ("learning_rate", "loss", "seconds")]
        lines.append(f"| {number} | " + " | ".join(" / ".join(pair) for pair in values) + " |")
    return [*lines, ""]


def time_ratio(tool: str, python: str, example: Example, repeats: int) -> float:
    """Train the first steps alternately with the tool and with packtool, and return the ratio of the median times."""
    short, folder = replace(example, max_steps=NUM_TIMED_STEPS), example.folder / tool / "timed"
    seconds: dict[str, list[float]] = {tool: [], "packtool": []}
    cache = example.folder / "packtool" / "cache"
    for number in range(repeats):
        output = folder / str(number)
        run_arguments = {
            tool: (python, ARGUMENTS[tool](short, output / tool)),
            "packtool": (sys.executable, packtool_arguments(short, cache, output / "packtool")),
        }
        for name, (interpreter, arguments) in run_arguments.items():
            steps = record(interpreter, name, arguments, output / f"{name}-record")["steps"]
            seconds[name] += [step["seconds"] for step in steps[1:]]
    return statistics.median(seconds[tool]) / statistics.median(seconds["packtool"])


def leakage_lines(example: Example, pythons: Mapping[str, str]) -> Iterator[str]:
    """Train packed with packtool and each tool, and yield a table of the leakage between packed samples."""
    from scripts._compare_packed import largest_leakage

    samples = [sample for step in run_packtool(example, example.folder / "packtool") for sample in step["samples"]]
    yield "| run | packs | loss | loss without isolation |\n|" + "---|" * 4
    packed = replace(example, accumulation=1, batch=1, max_steps=NUM_TIMED_STEPS)
    cache, folder = example.folder / "packtool" / "cache", example.folder / "packed"
    runs = {("packtool", "packtool"): packtool_arguments(packed, cache, folder / "packtool")}
    for tool in pythons:
        for setting, options in PACKING[tool].items():
            output = folder / f"{tool}-{setting}"
            runs[tool, setting] = with_options(ARGUMENTS[tool](packed, output), options)
    runs["packtool", "packtool"] = with_options(runs["packtool", "packtool"], {"packing": True, "packing-length": 1024})
    for (tool, setting), arguments in runs.items():
        python = pythons.get(tool, sys.executable)
        run = f"| {TOOLS.get(tool, tool)}, `{setting}` |"
        try:
            steps = record(python, tool, arguments, folder / f"{tool}-{setting}-record")["steps"]
        except SystemExit as error:
            yield f"{run} {str(error).splitlines()[-1]} | | |"
            continue
        num_packs, leakage, unisolated = largest_leakage(example.model, samples, steps)
        yield f"{run} {num_packs} | {leakage:.1e} | {unisolated:.1e} |"


def compare_tool(
    tool: str, python: str, example: Example, packtool: Sequence[Any], every_step: bool, repeats: int
) -> None:
    """Run a tool on an example, again if its targets or weights differ, and print its line."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(example.model / "tokenizer.json"))
    folder = example.folder / tool
    own = record(python, tool, ARGUMENTS[tool](example, folder / "run"), folder / "own")
    steps = own["steps"]
    result = repeated_result = compare(steps, packtool)
    system = SYSTEM_PROMPTS.get((tool, example.name), "")
    if set(result.extra) == {LINE_BREAK} or system:
        loss_scale = "default+train_newline" if result.extra else "default"
        packtool = run_packtool(example, folder / "packtool", loss_scale, system)
        repeated_result = compare(steps, packtool)
    if repeated_result.loss > MAX_LOSS_DIFFERENCE and not repeated_result.extra:
        arguments = ARGUMENTS[tool](replace(example, accumulation=1), folder / "run-again")
        repeated_result = compare(record(python, tool, arguments, folder / "again")["steps"], packtool)
    if repeats:
        result = replace(result, time=time_ratio(tool, python, example, repeats))
    title = f"{TOOLS[tool]} {next(iter(own['versions'].values()))}"

    def name_of(token: int) -> str:
        return str(tokenizer.decode([token], skip_special_tokens=False))

    print(summary_line(title, example.name, result, repeated_result, name_of), flush=True)
    if every_step:
        print("\n".join(step_lines(own["steps"], packtool)), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the comparisons of a command line and print the table."""
    parser = argparse.ArgumentParser(description="Compare packtool's training with that of other tools.")
    for tool, title in TOOLS.items():
        parser.add_argument(f"--{tool.removeprefix('ms-')}-python", dest=tool, help=f"interpreter that has {title}")
    parser.add_argument("--examples", nargs="+", choices=("text", "picture"), default=["text", "picture"])
    parser.add_argument("--realdata", type=Path, default=REALDATA)
    parser.add_argument("--work", type=Path, help="new folder for models, rows and outputs; default is temporary")
    parser.add_argument(
        "--small-vocabulary", action="store_true", help="cut the picture model's, too (not for ms-swift)"
    )
    parser.add_argument("--every-step", action="store_true", help="print the steps of every comparison")
    parser.add_argument("--repeats", type=int, default=0, help="number of alternating runs that measure the time")
    parser.add_argument("--packed", action="store_true", help="measure leakage between packed samples instead")
    options = parser.parse_args(arguments)
    pythons = {tool: python for tool in TOOLS if (python := getattr(options, tool))}
    if not pythons:
        parser.error("name the interpreter of at least one tool, such as --trl-python PYTHON")
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        if options.packed:
            example = make_example("text", work / "text", options.realdata, True)
            for line in leakage_lines(example, pythons):
                print(line, flush=True)
            return
        print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER), flush=True)
        for name in options.examples:
            example = make_example(name, work / name, options.realdata, options.small_vocabulary)
            packtool = run_packtool(example, work / name / "packtool")
            for tool, python in pythons.items():
                compare_tool(tool, python, example, packtool, options.every_step, options.repeats)


if __name__ == "__main__":
    main()
