"""Runs training examples of other tools in packtool, and prints a table of the results (see scripts/migrate).

Only paths of models and data are replaced: by small models of the same type, and by rows of the format that the example
names. Pictures are given to a small Qwen3-VL, which stands in for every family with pictures. Each example is
translated with ``packtool translate`` and passed to ``packtool train --dry-run`` or ``packtool export``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, training_args

sys.path.insert(0, str(Path(__file__).parent.parent))
from packtool.attention.support import refuse_unsupported
from packtool.cli.main import run
from packtool.demo.model import make_model
from packtool.encode.families import family_of
from packtool.errors import UnsupportedModelError
from scripts._migration_examples import Example, find_examples, project_of

NUM_ROWS, NUM_LONG_ROWS = 200, 8
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "head_dim": 16}
SMALL |= {"num_hidden_layers": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
SMALL |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
SMALL |= {"max_position_embeddings": 131072} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
_QUANTIZED = re.compile(r"gptq|awq|aqlm|bnb|nvfp4|prequantized", re.IGNORECASE)
_QUANTIZATIONS = {  # as in config.json of the examples' checkpoints; "gptq" for all methods that packtool refuses
    "gptq": {"quant_method": "gptq", "bits": 4},
    "bnb": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    | {"bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_use_double_quant": True},
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_MODEL_KEYS = ("model", "model_name_or_path", "base_model")
# Settings that need several processes.
_DISTRIBUTED = re.compile(r"^(fsdp|sequence_parallel_size|expert_parallel_size|deepspeed):", re.MULTILINE)
# Models whose state-space layers are slow without a GPU.
_RECURRENT = ("jamba", "falcon_h1", "bamba", "nemotron_h", "granitemoehybrid")
_VARIABLE = re.compile(r"[A-Z]\w*=")
_SPLIT_REASON = "packtool: error: "


_PAGE = """\
# Examples of other tools

This page shows which training examples of ms-swift, LLaMA-Factory, axolotl and TRL run with packtool unchanged.

Each configuration is translated with `packtool translate`, then passed to `packtool export` or to `packtool train
--dry-run --hardware h100`. No weights are loaded. Only the paths of models and data are replaced:

- A small random model of the same type replaces the model. For all models with pictures, it is a small Qwen3-VL with
  the module names of the original, with experts for Gemma 4 26B-A4B.
- Rows in the format that the example names replace the data.

Settings that distribute a model are planned for eight processes. Optional packages that the examples use (DeepSpeed,
bitsandbytes, torchao, Liger, Adam-mini, GaLore, APOLLO, mistral-common, trackers) are installed. In two examples of
axolotl, `tensor_parallel_size` becomes sequence parallelism: processes divide sequences, not matrices. Batches and,
apart from rounding, results are the same, and FSDP shards the weights. To repeat the test:

```bash
scripts/migrate ms-swift LLaMA-Factory axolotl trl --output docs/migration-table.md
```

These examples are not counted: preference, reward and reinforcement training, classification, embeddings, inference,
Megatron, conversions of finished models, and models that packtool does not train. `FILE#2` is the second command of a
file.

| project | examples |
|---|---|
| ms-swift | `examples/train` and `examples/export` |
| LLaMA-Factory | `examples/train_*` and `examples/extras` |
| axolotl | `examples` |
| TRL | commands with `sft.py` or `trl sft` in the documentation and docstrings |
"""


class NotTrainedError(Exception):
    """An example of a model that packtool does not train."""


@dataclass(frozen=True)
class Result:
    """Outcome of an example: ``runs``, ``refused`` or ``not counted``, and the reason."""

    example: Example
    outcome: str
    reason: str


def _add_experts(config: Path) -> None:
    """Change the configuration of a small Qwen3-VL to that of a Qwen3-VL with four experts per layer."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["model_type"] = "qwen3_vl_moe"
    settings["architectures"] = ["Qwen3VLMoeForConditionalGeneration"]
    settings["vision_config"]["model_type"] = "qwen3_vl_moe"
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    settings["text_config"] |= {"model_type": "qwen3_vl_moe_text", "mlp_only_layers": [], **experts}
    config.write_text(json.dumps(settings), encoding="utf-8")


class World:
    """Small models and rows that replace those of examples, made when they are first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        lines = (Path(__file__).parent / "migration_models.tsv").read_text(encoding="utf-8").splitlines()
        self._types = [tuple(line.split("\t")) for line in lines if not line.startswith("#")]
        make_model(str(root / "picture"), seed=0)
        config = root / "picture" / "config.json"
        config.write_text(config.read_text(encoding="utf-8").replace('"float32"', '"bfloat16"'), encoding="utf-8")
        Image.new("RGB", (96, 64), (200, 30, 60)).save(root / "picture.png")

    def model_type(self, name: str) -> str:
        """Return the model type of a checkpoint by its name."""
        for pattern, model_type in self._types:
            if re.search(pattern, name, re.IGNORECASE):
                return model_type
        raise NotTrainedError(f"no small model of the type of {name} can be made")

    def is_multimodal(self, name: str) -> bool:
        """Return whether the model of this name reads pictures; NotTrainedError if packtool does not train it."""
        model_type = self.model_type(name)
        family = family_of({"model_type": model_type, **({"vision_config": {}} if model_type in _OTHER else {})})
        if family.encoding is not None and not family.kinds:
            raise NotTrainedError(f"{model_type}: {family.refused or 'not trained yet'}")
        return family.encoding is not None

    def model(self, name: str, layer_inputs: int = 0) -> Path:
        """Return a small model of the type of the checkpoint ``name``; its layers have ``layer_inputs`` if not 0."""
        model_type = self.model_type(name)
        if self.is_multimodal(name):
            has_experts = model_type == "gemma4" and re.search(r"a\d+b", name, re.IGNORECASE) is not None
            folder = self.root / f"picture{'-mistral' * (model_type == 'mistral3')}{'-experts' * has_experts}"
            if not folder.exists():
                shutil.copytree(self.root / "picture", folder)
                self._add_tekken(folder)
                if has_experts:
                    _add_experts(folder / "config.json")
            return folder
        method = "bnb" if "bnb" in name.lower() else "gptq" if _QUANTIZED.search(name) else ""
        folder = self.root / "-".join(filter(None, (model_type, method, str(layer_inputs or ""))))
        if not folder.exists():
            small = {key: value for key, value in SMALL.items() if (model_type, key) != ("falcon", "head_dim")}
            for key, parts in (
                ("hidden_size", 1),
                ("intermediate_size", 1),
                ("head_dim", SMALL["num_attention_heads"]),
            ):
                small |= {key: max(small[key], layer_inputs // parts)} if key in small else {}
            if model_type in _RECURRENT:
                small["num_hidden_layers"] = 8
            try:
                config = AutoConfig.for_model(model_type, **small)
            except ValueError:
                raise NotTrainedError(f"transformers has no class for {model_type} models") from None
            if method:
                config.quantization_config = _QUANTIZATIONS[method]
            config.dtype = "bfloat16"
            config.save_pretrained(folder)
            config.to_json_file(folder / "config.json", use_diff=False)  # real ones are complete, too
            for file in _TOKENIZER_FILES:
                (folder / file).write_bytes((self.root / "picture" / file).read_bytes())
            if "istral" in name:
                self._add_tekken(folder)
        return folder

    def _add_tekken(self, folder: Path) -> None:
        """Add a tokenizer file of mistral-common, if that is installed, and its control tokens to the vocabulary."""
        if importlib.util.find_spec("mistral_common") is None:
            return
        data = importlib.resources.files("mistral_common") / "data" / "tekken_240911.json"
        (folder / "tekken.json").write_bytes(data.read_bytes())
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"])
        tokenizer.save(str(folder / "tokenizer.json"))

    def dataset(self, rows: Path) -> Path:
        """Return a folder with the rows as its splits ``train`` and ``test``."""
        folder = rows.with_suffix("")
        folder.mkdir(exist_ok=True)
        picture = folder / "picture.png"  # rows may only name media in their own folder
        picture.write_bytes((self.root / "picture.png").read_bytes())
        text = rows.read_text(encoding="utf-8").replace(str(self.root / "picture.png"), str(picture))
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")
        return folder

    def rows(self, form: str, role: str = "role", content: str = "content", min_tokens: int = 0) -> Path:
        """Return a file of rows: ``text``, ``alpaca``, ``pictures``, or conversations in a column named ``form``.

        Texts are repeated until they have at least ``min_tokens`` tokens.
        """
        path = self.root / "-".join(("rows", form, role, content, f"{min_tokens}.jsonl"))
        if not path.exists():
            with path.open("w", encoding="utf-8") as file:
                for number in range(NUM_LONG_ROWS if min_tokens else NUM_ROWS):
                    row = self._row(form, role, content, number)
                    if min_tokens:
                        row[form] *= 2 * min_tokens // len(row[form]) + 1
                    file.write(json.dumps(row) + "\n")
        return path

    def _row(self, form: str, role: str, content: str, number: int) -> dict[str, Any]:
        question, answer = f"What is the double of {number}?", f"It is {2 * number}, a number. " * (1 + number % 3)
        if form in ("text", "chapter"):
            return {form: answer}
        if form == "alpaca":
            return {"instruction": question, "input": "", "output": answer}
        roles = ("human", "gpt") if role == "from" else ("user", "assistant")
        picture: list[Any] = [{"type": "image"}, {"type": "text", "text": question}]
        asked = picture if form == "pictures" else question
        turns = [{role: roles[0], content: asked}, {role: roles[1], content: answer}]
        if form == "pictures":
            return {"messages": turns, "images": [str(self.root / "picture.png")]}
        return {form: turns}


# Multimodal models without a family of their own.
_OTHER = ("qwen2_audio", "phi4_multimodal", "voxtral", "emu3")


def replaced(example: Example, world: World) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """Return the command line and the YAML of an example with the paths of models and data replaced."""
    values = {**(example.settings or {}), **{key: " ".join(item) for key, item in example.option_values.items()}}
    name = next((str(values[key]).strip() for key in _MODEL_KEYS if values.get(key)), "")
    group_size = int((values.get("qat") or {}).get("group_size") or 0)
    new: dict[str, Any] = {key: str(world.model(name, group_size)) for key in _MODEL_KEYS if key in values}
    new |= {key: "main" for key in ("model_revision", "revision_of_model") if key in values}
    has_pictures = world.is_multimodal(name)
    chat = world.rows("pictures" if has_pictures else "messages")
    is_text = values.get("use_chat_template") == "false" or values.get("stage") == "pt" or "pt" in example.words[:2]
    rows = world.rows("text") if is_text or re.search(r"imdb|TinyStories", str(values)) else chat
    for key in {"dataset", "val_dataset", "eval_dataset"} & set(values):
        if example.project == "ms-swift":
            names = values[key] if isinstance(values[key], list) else str(values[key]).split()
            amounts = [int(item.partition("#")[2] or 0) for item in names]
            new[key] = [f"{rows}#{min(NUM_ROWS, amount)}" if amount else str(rows) for amount in amounts]
    if example.project == "LLaMA-Factory" and "dataset" in values:
        info = json.loads(Path("data", "dataset_info.json").read_text(encoding="utf-8"))
        names = [name.strip() for name in values["dataset"].split(",")]
        new["dataset"] = ",".join(name if name in info else "identity" for name in names)
    if str(values.get("dataset_dir", "")).startswith("REMOTE:"):
        new["dataset_dir"] = "data"
    if "dataset_name" in values:
        new["dataset_name"] = str(world.dataset(rows))
    for key in {"datasets", "pretraining_dataset", "test_datasets"} & set(values):
        entries = values[key] if isinstance(values[key], list) else [{"path": values[key]}]
        has_processor = has_pictures and "processor_type" in values
        min_tokens = int(values.get("min_sample_len") or 0)
        new[key] = [_entry(entry, world, has_processor, example.project, min_tokens) for entry in entries]
    targets = values.get("lora_target_modules")
    if has_pictures and isinstance(targets, str):  # the stand-in's name of the language model
        new["lora_target_modules"] = targets.replace("model.text_model.", "model.language_model.")
    settings = None if example.settings is None else {k: new.get(k, v) for k, v in example.settings.items()}
    return tuple(_new_words(example.words, new)), settings


def _entry(entry: Mapping[str, Any], world: World, has_pictures: bool, project: str, min_tokens: int) -> dict[str, Any]:
    """Return an entry of axolotl's or TRL's ``datasets`` with a local path; texts have at least ``min_tokens``."""
    kind = str(entry.get("type") or "")
    roles = entry.get("message_property_mappings") or {}
    role = roles.get("role") or entry.get("message_field_role") or "role"
    content = roles.get("content") or entry.get("message_field_content") or "content"
    if project == "TRL" or kind in ("pretrain", "completion"):
        path = world.rows(entry.get("field") or entry.get("text_column") or "text", min_tokens=min_tokens)
    elif kind.startswith("chat_template"):
        path = world.rows("pictures" if has_pictures else entry.get("field_messages") or "messages", role, content)
    else:
        path = world.rows("alpaca")
    return {key: item for key, item in entry.items() if key not in ("name", "data_files")} | {"path": str(path)}


def _new_words(words: Sequence[str], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield a command line whose options have the new values."""
    is_replaced = False
    for word in words:
        if word.startswith("--"):
            key, equals, _ = word.removeprefix("--").partition("=")
            is_replaced = key in new
            yield f"--{key}" if is_replaced and equals else word
            if is_replaced:
                yield from [new[key]] if isinstance(new[key], str) else new[key]
        elif not is_replaced:
            yield word


def packtool(*arguments: str, variables: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a command of packtool in this process; return its exit code and what it wrote to stdout and stderr."""
    output, messages = io.StringIO(), io.StringIO()
    environ = dict(os.environ)
    os.environ.update(variables or {})
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
        code = run(list(arguments))
    os.environ.clear()
    os.environ.update(environ)
    return code, output.getvalue(), messages.getvalue()


def try_example(example: Example, world: World, caches: dict[str, str]) -> Result:
    """Translate and run an example in the current directory; ``caches`` are those of examples before."""
    if example.excluded:
        return Result(example, "not counted", example.excluded)
    try:
        words, settings = replaced(example, world)
    except NotTrainedError as error:
        return Result(example, "not counted", str(error))
    file = world.root / "example.yaml"
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    words = tuple(
        str(file)
        if settings and word.endswith((".yaml", ".yml")) and "config_file" not in words[at - 1]
        else caches.get(word.strip("./").removesuffix("/train"), word)
        for at, word in enumerate(words)
    )
    environ = [f"{name}={value}" for name, value in example.environ.items() if "$" not in value]
    tool = example.project.lower()
    given = ["--", *environ, *words] if words else [str(file), "--from", tool]
    code, output, messages = packtool("translate", *given)
    if code == 0:
        file.write_text(output, encoding="utf-8")
        first_line = output.partition("\n")[0]
        variables = dict(word.split("=", 1) for word in shlex.split(first_line) if _VARIABLE.match(word))
        if " packtool export " in first_line:
            cache = str(world.root / f"cache-{len(caches)}")
            code, _, messages = packtool("export", "--config", str(file), "--output-dir", cache)
            target = str(yaml.safe_load(output).get("output_dir", ""))
            caches[target.strip("./")] = cache
        else:
            if _DISTRIBUTED.search(output):
                variables.setdefault("NPROC_PER_NODE", "8")
            arguments = ["train", "--config", str(file), "--dry-run", "--hardware", "h100"]
            code, _, messages = packtool(*arguments, variables=variables)
    if code == 0:
        return Result(example, "runs", "")
    reason = " ".join((messages.partition(_SPLIT_REASON)[2] or messages).split()).replace(f"{world.root}/", "")
    reason = re.sub(r" \(/[^)]*\)| \[[A-Z]\d{3}\]", "", reason)  # files of installed packages, codes
    return Result(example, *(("refused", reason) if is_trained(example, world) else ("not counted", reason)))


def is_trained(example: Example, world: World) -> bool:
    """Return whether packtool packs models of the example's family."""
    values = {**(example.settings or {}), **{key: " ".join(item) for key, item in example.option_values.items()}}
    folder = world.model(next(str(values[key]).strip() for key in _MODEL_KEYS if values.get(key)))
    try:
        refuse_unsupported(AutoConfig.from_pretrained(folder))
    except UnsupportedModelError:
        return False
    return True


def markdown(results: Sequence[Result], commits: Mapping[str, str]) -> str:
    """Return the page: the commits and rates of the projects, then a line for each example."""
    lines = [_PAGE, "| project | commit | counted | run | rate |", "|---|---|---:|---:|---:|"]
    for project, commit in [*commits.items(), ("all", "")]:
        outcomes = Counter(result.outcome for result in results if project in ("all", result.example.project))
        counted = outcomes["runs"] + outcomes["refused"]
        rate = f"{outcomes['runs'] / max(1, counted):.0%}"
        lines.append(f"| {project} | {commit[:12]} | {counted} | {outcomes['runs']} | {rate} |")
    lines += ["", "| project | file | result | reason |", "|---|---|---|---|"]
    for result in results:
        reason = result.reason.replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {result.example.project} | {result.example.file} | {result.outcome} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all examples of the checkouts and write the table."""
    training_args.is_torch_tf32_available = lambda: True  # of the GPU that dry runs plan for
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="write the table to this Markdown file")
    parser.add_argument("--only", default="", help="run examples whose file contains this text")
    args = parser.parse_args()
    results: list[Result] = []
    commits: dict[str, str] = {}
    output = args.output and args.output.resolve()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        os.environ["PACKTOOL_CACHE_DIR"] = str(world.root / "packtool")
        for checkout in [path.resolve() for path in args.checkouts]:
            project = project_of(checkout)
            if project is None:
                parser.error(f"{checkout} is a checkout of none of the four projects")
            command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
            commits[project] = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
            os.chdir(checkout)  # examples name files relative to it
            caches: dict[str, str] = {}
            for example in find_examples(project, checkout):
                if args.only in example.file:
                    results.append(try_example(example, world, caches))
                    print(project, example.file, results[-1].outcome, results[-1].reason, sep="\t", file=sys.stderr)
    table = markdown(results, commits)
    print(table) if output is None else output.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
