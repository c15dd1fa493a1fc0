"""A small world on disk: rows with pictures, a reduced Qwen3-VL with a tokenizer of single bytes, and their cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from packtool.cache.export import export
from packtool.config.data import ExportConfig
from packtool.config.train import TrainConfig
from packtool.progress import SilentProgress
from tests.batch.reduced import make_picture

MAX_LENGTH = 128
NUM_ROWS = 40
MIN_PIXELS, MAX_PIXELS = 64 * 64, 112 * 112
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text -}}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
"""


@dataclass(frozen=True)
class TinyWorld:
    """Directories of a model and its cache, and the file of its rows."""

    model: str
    cache: str
    rows: str

    def config(self, output_dir: Path | str, **settings: Any) -> TrainConfig:
        """Full training of every part, packed, deterministic, in this process."""
        defaults: dict[str, Any] = {
            "model": self.model,
            "cached_dataset": (self.cache,),
            "output_dir": str(output_dir),
            "packing": True,
            "packing_length": 256,
            "train_type": "full",
            "freeze_vit": False,
            "freeze_aligner": False,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "dataloader_num_workers": 0,
            "verify_packing": False,  # which tests of its own prove, and takes as long as a step or two
        }
        return TrainConfig(**defaults | settings)

    def streamed(self, *rows: str) -> dict[str, Any]:
        """Settings of a run that streams rows, by default those of the cache."""
        options: dict[str, Any] = {"cached_dataset": (), "dataset": rows or (self.rows,), "max_length": MAX_LENGTH}
        options["media_root"] = str(Path(self.rows).parent)
        return options | {"streaming": True, "max_steps": 1000, "packing_interval": 25, "shuffle_buffer_size": 10}


def make_tiny_world(root: Path) -> TinyWorld:
    """Write everything below ``root``; takes a second or two."""
    tiny = TinyWorld(str(root / "model"), str(root / "cache"), str(root / "rows" / "train.json"))
    make_tiny_model(root / "model")
    make_tiny_rows(root / "rows")
    export_rows(tiny, tiny.cache)
    return tiny


def make_tiny_text_world(root: Path) -> TinyWorld:
    """The same with a Qwen3 that sees nothing, and the rows that have no pictures."""
    tiny = TinyWorld(str(root / "model"), str(root / "cache"), str(root / "rows" / "train.json"))
    make_tiny_model(root / "model")
    (root / "model" / "preprocessor_config.json").unlink()
    text = Qwen3VLConfig.from_pretrained(root / "model").text_config.to_dict()
    copied_fields = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
    )
    Qwen3ForCausalLM(
        Qwen3Config(**{name: text[name] for name in copied_fields}, num_key_value_heads=2)
    ).save_pretrained(root / "model")
    make_tiny_rows(root / "rows")
    rows = [row for row in json.loads(Path(tiny.rows).read_text()) if not row["images"]]
    Path(tiny.rows).write_text(json.dumps(rows))
    export_rows(tiny, tiny.cache)
    return tiny


def export_rows(tiny: TinyWorld, output_dir: Path | str, **settings: Any) -> None:
    """Export the rows of a tiny world."""
    defaults: dict[str, Any] = {"model": tiny.model, "dataset": (tiny.rows,), "output_dir": str(output_dir)}
    export(ExportConfig(**defaults | {"max_length": MAX_LENGTH} | settings), SilentProgress())


def make_tiny_rows(directory: Path) -> None:
    """40 conversations of one or two turns, every third without a picture, every seventh with two."""
    (directory / "pictures").mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = []
    for row_index in range(NUM_ROWS):
        images = []
        for _ in range(0 if row_index % 3 == 0 else 2 if row_index % 7 == 0 else 1):
            images.append(f"pictures/{len(list((directory / 'pictures').iterdir())):04d}.png")
            width, height = random.integers(40, 140, 2)
            (directory / images[-1]).write_bytes(make_picture(int(width), int(height), seed=row_index))
        question = "<image>" * len(images) + "abcdefgh"[: 1 + row_index % 8]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "yn"[row_index % 2]}]
        if row_index % 2:
            messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "xyz" * (row_index % 5)}]
        rows.append({"messages": messages, "images": images})
    (directory / "train.json").write_text(json.dumps(rows))


def make_tiny_model(directory: Path) -> None:
    """Two layers of width 64 in each tower, with weights that are not near zero."""
    directory.mkdir()
    tokenizer = Tokenizer(
        models.BPE(vocab={char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in CONTROL_TOKENS}
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    _write_json(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    _write_json(
        directory / "preprocessor_config.json",
        {
            "image_processor_type": "Qwen2VLImageProcessor",
            "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
        },
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    size = {"hidden_size": 64, "intermediate_size": 96}
    text = size | {"vocab_size": 272, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "rope_parameters": rope, "max_position_embeddings": 512, "tie_word_embeddings": True}
    text |= {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    vision = size | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 64}
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision | {"deepstack_visual_indexes": [0]},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=271,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.06)
    model.save_pretrained(directory)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def read_metrics(output_dir: Path | str) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` without what the clock decides."""
    lines = [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]
    rates = ("target_tokens_per_second", "tokens_per_second", "samples_per_second")
    clock = ("seconds", *rates, "data_wait", "log_wait", "memory_gib")
    return [{name: value for name, value in line.items() if name not in clock} for line in lines]


def check_same_rest(full_run: Path, resumed: Path, step: int) -> None:
    """From ``step`` on the resumed run did what the whole one did."""
    expected = read_metrics(full_run)
    assert [line["step"] for line in expected] == list(range(1, len(expected) + 1))
    assert read_metrics(resumed) == expected[step:]
    last = f"checkpoint-{len(expected)}"
    names = [path.name for path in (full_run / last).glob("*.safetensors")]
    assert names
    for name in names:
        weights, others = load_file(full_run / last / name), load_file(resumed / last / name)
        assert all(torch.equal(weight, others[key]) for key, weight in weights.items())
