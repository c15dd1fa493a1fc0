"""A Qwen3-VL that a CPU can train, with the real processor, chat template and a part of the real tokenizer.

Its vocabulary is cut to the tokenizer's first merges: with all 151,936 tokens the head would be nearly all of so small
a model, in the real one it is a twentieth.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

VOCABULARY = 8192
TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 32}
TEXT |= {"num_attention_heads": 8, "num_key_value_heads": 4}
VISION = {"hidden_size": 128, "intermediate_size": 512, "depth": 5, "num_heads": 4, "out_hidden_size": 256}


def reduce_model(source: Path, target: Path) -> None:
    """A small random Qwen3-VL with the real processor, chat template, and the first merges of the real tokenizer."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    new_ids = cut_tokenizer(target, VOCABULARY)
    config = json.loads((target / "config.json").read_text())
    text = config["text_config"]
    config |= {name: new_ids[number] for name, number in config.items() if name.endswith("_token_id")}
    text |= {name: new_ids[number] for name, number in text.items() if name.endswith("_token_id")}
    text |= TEXT | {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    rope = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    text[rope]["mrope_section"] = [6, 5, 5]
    config["vision_config"] |= VISION | {"deepstack_visual_indexes": [1, 2, 3], "num_position_embeddings": 256}
    config["tie_word_embeddings"] = True
    (target / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(target))
    model.float().save_pretrained(target)


def cut_tokenizer(folder: Path, size: int) -> dict[int, int]:
    """Keep as many merges as ``size`` has room for, and return the new ids of control tokens by the old ones."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    kept = size - len(added)
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < kept}
    # Token i > 255 is what merge i - 256 makes.
    model["merges"] = model["merges"][: kept - 256]
    new_ids = {token["id"]: kept + place for place, token in enumerate(added)}
    for token in added:
        token["id"] = new_ids[token["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    names = settings.get("added_tokens_decoder", {})
    settings["added_tokens_decoder"] = {str(new_ids[int(number)]): token for number, token in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return new_ids
