"""Does another reader of packs read what packtool has written? A small fixed set, and what must come out of it.

usage: python scripts/conformance.py write DIR    the set, in every format, and DIR/expected.json
       python scripts/conformance.py check FILE   what a reader has found in it, against what is expected

FILE is JSON: ``{"packs": [{"input_ids": [...], "labels": [...], "position_ids": [[...], ...], "cu_seqlens": [...]},
...], "loss": ...}`` in the order of the packs. Labels are not shifted; ``loss`` is optional, and defined in
docs/format.md. What a reader does not know (positions, say) it leaves out, and it is not compared.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from packtool.cli.main import run
from packtool.report.tables import print_table

CONTROL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CAPACITY = 160
FORMATS = ("parquet", "arrow", "megatron", "webdataset", "energon")


def rows(folder: Path, with_media: bool) -> list[dict[str, Any]]:
    """Twelve conversations of one or two turns, some with one or two pictures."""
    for name, size in (("wide", (160, 64)), ("tall", (64, 128))):
        Image.new("RGB", size, (200, 30, 60)).save(folder / f"{name}.png")
    found = []
    for i in range(12):
        images = [f"{name}.png" for name in ("wide", "tall")[: i % 3]] if with_media else []
        turns = [{"role": "user", "content": f"{'<image>' * len(images)}question {i}"}]
        turns.append({"role": "assistant", "content": "yes " * (i % 5 + 1)})
        if i % 4 == 0:
            turns += [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because " * (i % 3)}]
        found.append({"messages": turns, "images": images})
    return found


def make_model(folder: Path) -> None:
    """A model without weights: a tokenizer of bytes, which nothing was learned for, a template and a configuration."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    number = {token: tokenizer.token_to_id(token) for token in CONTROL}
    width = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    config = {
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": 320,
            **width,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": rope,
        },
        "vision_config": {"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32}
        | {"out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        "image_token_id": number["<|image_pad|>"],
        "video_token_id": number["<|video_pad|>"],
        "vision_start_token_id": number["<|vision_start|>"],
        "vision_end_token_id": number["<|vision_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def write(directory: Path) -> None:
    """Make the set; ``media`` holds rows with pictures, ``text``, for formats without a place for them, none."""
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        sys.exit(f"{directory}: {error.strerror}; name a folder that does not exist yet")
    make_model(directory / "model")
    expected = {}
    for kind in ("media", "text"):
        data = directory / f"{kind}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows(directory, kind == "media")))
        cache = str(directory / f"{kind}-cache")
        settings = ["--model", str(directory / "model"), "--dataset", str(data), "--max-length", str(CAPACITY)]
        _run("export", *settings, "--output-dir", cache)
        packing = ["--packing-length", str(CAPACITY), "--packing-algorithm", "sequential"]
        for name in FORMATS:
            if name != "megatron" or kind == "text":
                place = str(directory / f"{kind}-{name}")
                _run("pack", cache, "--output-dir", place, "--format", name, *packing, "--packs-per-file", "3")
        expected[kind] = _expected(directory / f"{kind}-arrow")
    (directory / "expected.json").write_text(json.dumps(expected))


def loss_of(packs: list[dict[str, Any]]) -> float:
    """The mean over all targets of a number made of what predicts each: see docs/format.md."""
    total, count = 0.0, 0
    for pack in packs:
        ids, labels, cuts = pack["input_ids"], pack["labels"], pack["cu_seqlens"]
        places = pack["position_ids"][-3:] if len(pack["position_ids"]) > 1 else [pack["position_ids"][0]] * 3
        for start, end in pairwise(cuts):
            for i in range(start + 1, end):
                if labels[i] != -100:
                    t, h, w = (row[i - 1] for row in places)
                    total += (31 * ids[i - 1] + 17 * labels[i] + 7 * t + 3 * h + w) % 1009 / 1009
                    count += 1
    return total / count


def check(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Differences, in words; none if the reader is right."""
    if len(found["packs"]) != len(expected["packs"]):
        return [f"{len(found['packs'])} packs, and there are {len(expected['packs'])}"]
    wrong = []
    for number, (here, there) in enumerate(zip(found["packs"], expected["packs"], strict=True)):
        wrong += [f"pack {number}: {name} differ" for name in there if name in here and here[name] != there[name]]
    if "loss" in found and abs(found["loss"] - expected["loss"]) > 1e-6:
        wrong.append(f"the loss is {found['loss']:.6f}, and must be {expected['loss']:.6f}")
    return wrong


def _expected(directory: Path) -> dict[str, Any]:
    import pyarrow as pa

    names = ("input_ids", "labels", "position_ids", "cu_seqlens")
    files = sorted(directory.glob("*.arrow"))
    lines = [line for file in files for line in pa.ipc.open_stream(file.read_bytes()).read_all().to_pylist()]
    packs = [{name: line[name] for name in names} for line in lines]
    return {"packs": packs, "loss": loss_of(packs)}


def _read(file: str) -> dict[str, Any]:
    """What a reader has found; ends the command with what is wrong with the file."""
    try:
        found = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{file}: {getattr(error, 'strerror', None) or f'no JSON: {error}'}")
    packs = found.get("packs") if isinstance(found, dict) else None
    is_whole = isinstance(packs, list) and all(isinstance(pack, dict) for pack in packs)
    if not is_whole or not isinstance(found.get("loss", 0.0), (int, float)):
        sys.exit(f'{file}: not {{"packs": [{{"input_ids": [...], ...}}, ...], "loss": ...}}')
    return found


def _run(*words: str) -> None:
    if code := run([*words, "--json"]):
        sys.exit(code)


def main() -> int:
    """Run what is asked for."""
    match sys.argv[1:]:
        case ["write", directory]:
            write(Path(directory))
            print(f"written: {directory}")
        case ["check", file]:
            expected = json.loads((Path(__file__).parent.parent / "docs" / "format-expected.json").read_text())
            found = _read(file)
            # The two have different numbers of packs; where neither fits, the nearer is told.
            kind = min(expected, key=lambda name: abs(len(expected[name]["packs"]) - len(found["packs"])))
            wrong = check(found, expected[kind])
            told = wrong or [f"all {len(found['packs'])} packs are right"]
            print_table(f"{file} against the set {kind}", [("", line) for line in told], "l")
            return bool(wrong)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
