"""The commands of a golden record, and wrong command lines made from every command's ``--help``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

COMMANDS = ("export", "import", "train", "eval", "merge", "demo", "inspect", "plan", "pack", "simulate", "verify")


@dataclass(frozen=True)
class Command:
    """A command line and what it writes.

    Args:
        words: behind ``packtool``.
        needs: names of the commands that must have ended before it begins.
        writes: files and directories that are recorded when it has ended.
        num_processes: started by torchrun if more than 1.
    """

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    num_processes: int = 1


def commands() -> list[Command]:
    """Every command that does something, in an order in which few wait for others."""
    return [*_wrong_files(), *_exports(), *_runs(), *_plans(), *_others()]


def _command(name: str, line: str, needs: str = "", writes: Sequence[str] = (), num_processes: int = 1) -> Command:
    return Command(name, tuple(line.split()), tuple(needs.split()), tuple(writes), num_processes)


def helps() -> list[Command]:
    """The ``--help`` of packtool and of every command."""
    return [_command("help/packtool", "--help"), *(_command(f"help/{name}", f"{name} --help") for name in COMMANDS)]


def _wrong_files() -> Iterator[Command]:
    yield _command("files/wrong-mix", "plan --mix mix-wrong.yaml --packing-length 512")
    yield _command("files/wrong-settings", "train --config train-wrong.yaml --set nothing=1 --dry-run")


def _exports() -> Iterator[Command]:
    def export(cache: str, rows: str, model: str, options: str = "", command: str = "export") -> Command:
        line = f"{command} --model models/{model} --dataset rows/{rows} --output-dir caches/{cache} --json {options}"
        return _command(f"export/{cache}", line, writes=[f"caches/{cache}"])

    yield export("texts", "texts.jsonl", "text", "--max-length 512")
    yield export("more-texts", "more-texts.jsonl", "text", "--max-length 512")
    yield export("long-texts", "long-texts.jsonl", "text", "--max-length 2048")
    yield export("pictures", "pictures.jsonl", "vision", "--split-dataset-ratio 0.2")
    yield export("shared", "shared.jsonl", "vision")
    yield export("thoughts-expanded", "thoughts.jsonl", "text", "--expand-turns true")
    yield export("videos", "videos.jsonl", "vision", "--fps-max-frames 4")
    yield export("sounds", "sounds.jsonl", "omni", "--video-max-pixels 3136 --video-min-pixels 784")
    yield export("embedded", "pictures.jsonl", "vision", "--media embed --dataset-num-proc 2 --rows-per-shard 64")
    yield export("documents", "documents.jsonl", "text", "--max-length 128 --truncation-strategy split")
    yield export("thoughts-auto", "thoughts.jsonl", "text", "--expand-turns auto --loss-scale last_round")
    yield export("cut-left", "texts.jsonl", "text", "--max-length 100 --truncation-strategy left --seed 7")
    yield export("cut-right", "texts.jsonl#50%", "text", "--max-length 100 --truncation-strategy right")
    yield export("trimmed", "videos.jsonl", "vision", "--max-length 64 --media-overflow trim --loss-scale all")
    yield export(
        "channels", "texts.jsonl rows/thoughts.jsonl", "text", "--system Brief. --val-dataset rows/documents.jsonl"
    )
    yield export("tokens", "tokens.parquet", "text", command="import")
    yield export("dry-run", "texts.jsonl", "text", "--dry-run")
    yield export("strict", "texts.jsonl", "text", "--strict")
    yield _command(
        "export/packs",
        "import packs/parquet --model models/text --output-dir caches/packs --json",
        "pack/parquet",
        ["caches/packs"],
    )


def _runs() -> Iterator[Command]:
    def run(name: str, line: str, needs: str = "", num_processes: int = 1) -> Command:
        words = f"train --learning-rate 1e-3 --logging-steps 1 --dataloader-num-workers 0 {line} --json"
        directory = re.search(r"--output-dir (\S+)", words)
        return _command(f"train/{name}", words, needs, [directory[1]] if directory else (), num_processes)

    texts = "--model models/text --cached-dataset caches/texts --packing-length 512 --train-type full"
    yield run("two-ranks", f"{texts} --save-steps 3 --max-steps 8 --output-dir runs/ranks", "export/texts", 2)
    yield run(
        "resumed-on-one",
        f"{texts} --save-steps 3 --max-steps 8 --output-dir runs/ranks"
        " --resume-from-checkpoint runs/ranks/checkpoint-3",
        "train/two-ranks",
    )
    yield run("one-rank", f"{texts} --save-steps 4 --max-steps 8 --output-dir runs/one", "export/texts")
    yield run(
        "changed-data",
        f"{texts.replace('caches/texts', 'caches/more-texts')} --save-steps 4 --output-dir runs/one"
        " --resume-from-checkpoint runs/one/checkpoint-4 --data-change allow --max-steps 8",
        "train/one-rank export/more-texts",
    )
    yield run(
        "lora",
        "--model models/vision --cached-dataset caches/pictures --packing-length 256 --max-steps 4"
        " --eval-strategy steps --eval-steps 2 --save-steps 2 --gradient-accumulation-steps 2 --output-dir runs/lora",
        "export/pictures",
    )
    yield run(
        "mixture",
        "--model models/text --mix mix-last-round.yaml --packing-length 2048 --train-type full --max-steps 3"
        " --save-only-model --output-dir runs/mixture --enable-channel-loss",
        "export/texts export/long-texts",
    )
    yield run(
        "stages",
        "--model models/text --mix stages.yaml --train-type full --max-steps 6 --save-steps 4 --output-dir runs/stages",
        "export/texts export/long-texts",
    )
    yield run(
        "trees",
        "--model models/vision --cached-dataset caches/shared --packing-length 512 --share-prefix true --max-steps 3"
        " --train-type full --output-dir runs/trees",
        "export/shared",
    )
    yield run(
        "padded",
        "--model models/text --cached-dataset caches/texts --packing false --per-device-train-batch-size 4"
        " --max-steps 3 --loss-reduction sample --train-type full --output-dir runs/padded",
        "export/texts",
    )
    yield run(
        "samples-per-step",
        f"{texts} --samples-per-step 16 --max-steps 3 --save-strategy no --output-dir runs/samples",
        "export/texts",
    )
    yield run(
        "streamed",
        "--model models/text --dataset rows/texts.jsonl --streaming --max-length 512 --packing-interval 25"
        " --shuffle-buffer-size 10 --max-steps 5 --save-steps 3 --train-type full --output-dir runs/streamed",
    )
    yield run(
        "media",
        "--model models/omni --cached-dataset caches/sounds --packing-length 1024 --train-type full --max-steps 3"
        " --freeze-vit false --output-dir runs/media",
        "export/sounds",
    )
    yield run("dry-run", f"{texts} --num-train-epochs 3 --dry-run --output-dir runs/dry", "export/texts")
    yield run("settings-file", "--config train.yaml --set max_steps=2 --output-dir runs/file --dry-run", "export/texts")


def _plans() -> Iterator[Command]:
    def plan(name: str, line: str, needs: str = "", writes: Sequence[str] = ()) -> Command:
        return _command(f"plan/{name}", f"plan {line} --json", needs, writes)

    drawn = "--lengths rows/lengths.json --packing-length 8192"
    for num_ranks in (1, 2, 8):
        ranks = f"--world-size {num_ranks}"
        for name, options in {
            "best-fit": "",
            "binpacking": "--packing-algorithm binpacking --packing-batch-size 500",
            "sequential": "--packing-algorithm sequential --look-ahead 16",
            "window": "--packing-window 700 --balance window",
            "unbalanced": "--balance none --gradient-accumulation-steps 3 --seed 7",
            "ordered": "--shuffle false --num-train-epochs 2",
            "samples-per-step": "--samples-per-step 64",
            "max-samples": "--max-samples-per-pack 4 --max-length 4000",
            "padded": "--packing false --per-device-train-batch-size 4",
            "by-length": "--packing false --group-by-length --per-device-train-batch-size 4",
            "dynamic": "--packing false --dynamic-batch-tokens 8192 --dynamic-max-batch-size 32",
        }.items():
            yield plan(f"{name}-{num_ranks}", f"{drawn} {ranks} {options}")
        yield plan(
            f"trees-{num_ranks}", f"caches/shared --packing-length 512 {ranks} --share-prefix true", "export/shared"
        )
        yield plan(
            f"wide-trees-{num_ranks}",
            f"caches/shared --packing-length 1024 {ranks} --share-prefix true --max-rows-per-tree 4",
            "export/shared",
        )
        mixtures = "export/texts export/long-texts"
        for mix in ("mix", "mix-last-round", "mix-temperature", "stages"):
            limit = "--max-steps 20" if mix == "stages" else ""
            yield plan(f"{mix}-{num_ranks}", f"--mix {mix}.yaml --packing-length 2048 {ranks} {limit}", mixtures)
        yield plan(f"mix-all-{num_ranks}", f"--mix mix.yaml --mix-stop all --packing-length 2048 {ranks}", mixtures)
    parallel = "--sequence-parallel-size 4 --world-size 8 --hardware h100"
    skrull = f"{drawn} {parallel} --schedule skrull"
    yield plan("skrull", f"{skrull} --bucket-size 8192 --model models/text", "")
    yield plan("skrull-sized", f"{skrull} --bucket-size 26K")
    yield plan("sequence-parallel", f"{drawn} {parallel}")
    yield plan(
        "stages-parallel",
        "--mix stages-parallel.yaml --max-steps 20 --world-size 8 --sequence-parallel-size 2",
        "export/texts export/long-texts",
    )
    yield plan(
        "amounts", "caches/texts#2.5x caches/long-texts#50% --packing-length 2048", "export/texts export/long-texts"
    )
    yield plan(
        "interleaved",
        "caches/texts caches/long-texts --interleave-probs 0.7 0.3 --packing-length 2048",
        "export/texts export/long-texts",
    )
    yield plan(
        "once",
        "caches/texts caches/long-texts --mix-strategy interleave_once --packing-length 2048",
        "export/texts export/long-texts",
    )
    yield plan("pictures", "caches/pictures --packing-length 512 --max-media-tokens-per-pack 16", "export/pictures")
    yield plan("sweep", f"{drawn} --sweep 8192,16K,32768")
    yield plan("time", f"{drawn} --tflops 400 --num-train-epochs 3")
    yield plan("fit", "caches/texts --fit 80GB --hardware h100 --world-size 2", "export/texts")
    yield plan(
        "fit-pictures", "caches/shared --fit 40GB --hardware a100 --world-size 8 --train-type full", "export/shared"
    )
    yield plan(
        "model",
        "caches/texts --packing-length 512 --model models/text --hardware h100 --world-size 2 --tflops 400",
        "export/texts",
    )
    yield plan(
        "model-pictures",
        "caches/pictures --packing-length 512 --model models/vision --freeze-vit false",
        "export/pictures",
    )
    yield plan(
        "saved", "caches/texts --packing-length 512 --world-size 2 --save plan.bin", "export/texts", ["plan.bin"]
    )
    yield plan("resumed", "--resume runs/one/checkpoint-4 --world-size 2", "train/changed-data")
    yield plan(
        "resumed-with-others", "caches/more-texts --resume runs/lora --world-size 2", "train/lora export/more-texts"
    )
    yield _command("plan/table", "plan caches/texts --packing-length 512 --world-size 2", "export/texts")
    yield _command("plan/fit-table", "plan caches/texts --fit 80GB --hardware h100 --world-size 2", "export/texts")
    yield _command(
        "plan/mix-table", "plan --mix stages.yaml --max-steps 20 --world-size 2", "export/texts export/long-texts"
    )


def _others() -> Iterator[Command]:
    for form in ("parquet", "arrow", "megatron", "webdataset", "energon"):
        yield _command(
            f"pack/{form}",
            f"pack caches/texts --format {form} --output-dir packs/{form} --json",
            "export/texts",
            [f"packs/{form}"],
        )
    yield _command(
        "pack/pictures",
        "pack caches/pictures --format webdataset --output-dir packs/pictures --json",
        "export/pictures",
        ["packs/pictures"],
    )
    yield _command(
        "pack/plan", "pack caches/texts --plan plan.bin --output-dir packs/plan --json", "plan/saved", ["packs/plan"]
    )
    drawn = "simulate --lengths rows/lengths.json --model 8b --steps 2 --json"
    yield _command("simulate/lengths", f"{drawn} --world-size 8 --sequence-parallel-size 4")
    yield _command("simulate/distribution", "simulate --distribution lmsys --world-size 16 --steps 1 --json")
    yield _command(
        "simulate/a100", f"{drawn} --world-size 8 --hardware a100 --sequence-parallel-type ring --zero-stage 3"
    )
    yield _command("simulate/cache", "simulate caches/texts --world-size 4 --sequence-parallel-size 2", "export/texts")
    for cache in ("texts", "pictures", "sounds", "documents", "tokens"):
        yield _command(f"inspect/{cache}", f"inspect caches/{cache} --json", f"export/{cache}")
        yield _command(f"inspect/{cache}-row", f"inspect caches/{cache} --row 5 --json", f"export/{cache}")
        yield _command(f"inspect/{cache}-verify", f"inspect caches/{cache} --verify --json", f"export/{cache}")
    yield _command("inspect/table", "inspect caches/pictures", "export/pictures")
    for run, needs in (("ranks", "train/resumed-on-one"), ("one", "train/changed-data"), ("stages", "train/stages")):
        yield _command(f"inspect/run-{run}", f"inspect runs/{run} --trained --json", needs)
        for step in (1, 5):
            yield _command(f"inspect/run-{run}-step-{step}", f"inspect runs/{run} --step {step} --json", needs)
    yield _command("inspect/run-row", "inspect caches/texts --row 3 --run runs/ranks --json", "train/resumed-on-one")
    yield _command("inspect/pack", "inspect caches/texts --plan plan.bin --pack 2", "plan/saved")
    yield _command("verify/texts", "verify --model models/text --cached-dataset caches/texts --json", "export/texts")
    yield _command(
        "verify/trees",
        "verify --model models/vision --cached-dataset caches/shared --share-prefix true --json",
        "export/shared",
    )
    yield _command(
        "verify/trajectory",
        "verify --model models/text --cached-dataset caches/texts --trajectory 3 --samples-per-step 4 --json",
        "export/texts",
    )
    yield _command(
        "eval/pictures",
        "eval --model models/vision --cached-dataset caches/pictures --output eval.parquet --json",
        "export/pictures",
        ["eval.parquet"],
    )
    yield _command(
        "eval/adapter",
        "eval --model runs/lora/checkpoint-4 --cached-dataset caches/pictures --limit 10"
        " --split train --output eval-adapter.parquet --json",
        "train/lora",
        ["eval-adapter.parquet"],
    )
    yield _command("merge/lora", "merge runs/lora/checkpoint-4 --output merged --json", "train/lora", ["merged"])


@dataclass(frozen=True)
class Option:
    """An option of a command, as its ``--help`` shows it.

    Args:
        kind: ``bool``, ``TEXT``, ``N``, ..., or the choices as ``a|b``.
        default: empty if none is shown.
    """

    name: str
    kind: str
    default: str


_OPTION = re.compile(
    r"^  (--[a-z0-9-]+)(?:, --[a-z0-9-]+)*( / --no-[a-z0-9-]+(?:, --[a-z0-9-]+)*)?(?: (\S+))?(?:  .*)?$"
)
_NOT_SETTINGS = ("--config", "--set", "--json", "--debug", "--version")
_CORRECT = {"N": "2", "X": "0.5", "TOKENS": "64", "BYTES": "1GB", "bool": "true", "JSON": "{}"}
_WRONG = {
    "N": ("many", "-1"),
    "X": ("half", "-1"),
    "TOKENS": ("64Q",),
    "BYTES": ("much",),
    "bool": ("maybe",),
    "JSON": ("{",),
    "TEXT": ("",),
    "FILE": ("nowhere.yaml",),
}
_TEXTS = {
    "--mix": "mix.yaml",
    "--plan": "plan.bin",
    "--dataset": "rows/texts.jsonl",
    "--deepspeed": "zero2",
    "--fsdp": "full_shard",
    "--bucket-size": "8192",
    "--interleave-probs": "0.5",
    "--val-dataset": "rows/texts.jsonl",
    "--resume-from-checkpoint": "true",
    "--save": "plan",
    "--sweep": "4096,8192",
    "--html": "page.html",
    "--lengths": "rows/lengths.json",
    "--resume": "runs/none",
    "--fit": "80GB",
    "--adapters": "runs/none",
    "--columns": "query=title",
    "--freeze-parameters": "model",
    "--trainable-parameters": "model",
    "--target-regex": "proj",
    "--modules-to-save": "lm_head",
}
# Without a cache that is there, whatever a command's settings allow ends with the same message.
_BASES = {
    "export": ("export --model models/text --dataset rows/none.jsonl --output-dir caches/none",),
    "import": ("import --model models/text --dataset rows/none.parquet --output-dir caches/none",),
    "train": tuple(
        f"train --model models/text --output-dir runs/none {options}"
        for options in (
            "--cached-dataset caches/none",
            "--cached-dataset caches/none --packing false",
            "--cached-dataset caches/none --schedule skrull",
            "--dataset rows/none.jsonl --streaming true --max-steps 5",
        )
    ),
    "plan": tuple(
        f"plan {options}"
        for options in (
            "caches/none",
            "caches/none --fit 80GB",
            "caches/none --schedule skrull",
        )
    ),
    "pack": ("pack caches/none --output-dir packs/none",),
    "simulate": ("simulate caches/none",),
    "inspect": ("inspect caches/none", "inspect caches/none --plan plan.bin"),
    "eval": ("eval --model models/text --cached-dataset caches/none --output none.parquet",),
    "verify": ("verify --model models/text --cached-dataset caches/none",),
    "demo": ("demo --output-dir rows",),
    "merge": ("merge runs/none --output merged-none",),
}


def options_of(help_text: str) -> list[Option]:
    """The options that a ``--help`` lists."""
    options = []
    for block in re.split(r"\n(?=  -)", help_text):
        match = _OPTION.match(block.partition("\n")[0])
        if match and match[1] not in _NOT_SETTINGS:
            default = re.search(r"\(default:\s+([^)]*)\)", block)
            options.append(Option(match[1], "bool" if match[2] else match[3] or "flag", default[1] if default else ""))
    return options


def wrong_lines(command: str, help_text: str) -> dict[str, list[list[str]]]:
    """Command lines that the settings of a command refuse, and those beside them that they allow.

    Returns:
        name of the group -> words of each line: every option's name misspelt, every option with values it does not
        take, an option of each kind without a value, and every option together with each of the command's base lines.
    """
    options = options_of(help_text)
    bases = [line.split() for line in _BASES.get(command, (command,))]
    first = bases[0]
    lines: dict[str, list[list[str]]] = {"values": [first], "names": [first]}
    for option in options:
        middle = len(option.name) // 2
        misspelt = option.name[:middle] + option.name[middle + 1 :]
        lines["names"].append([*first, misspelt, *_correct(option)[:1]])
        values = ("neither",) if "|" in option.kind else _WRONG.get(option.kind, ())
        lines["values"] += [[*first, option.name, value] for value in values]
    first_of_kind = {option.kind: option for option in reversed(options) if option.kind != "bool"}
    lines["values"] += [[*first, option.name] for option in first_of_kind.values()]
    lines["values"] += [first[:2]]
    for number, base in enumerate(bases):
        group = [base]
        for option in options:
            group += [[*base, option.name, value] for value in _correct(option) if option.name not in base]
        lines[f"base-{number}"] = group
    # Groups run side by side, and a run locks its directory.
    return {
        group: [[f"{word}-{group}" if word == "runs/none" else word for word in words] for words in members]
        for group, members in lines.items()
    }


def _correct(option: Option) -> list[str]:
    """Values that an option takes."""
    if option.name in _TEXTS:
        return [_TEXTS[option.name]]
    choices = "true|false" if option.kind == "bool" else option.kind.removesuffix("...")
    if "|" in choices:
        return [choice for choice in choices.split("|") if choice != option.default]
    return [_CORRECT.get(option.kind, "x")]
