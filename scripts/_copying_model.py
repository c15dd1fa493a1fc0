"""A small Qwen3 with random weights whose attention copies from the context, as pretrained models learn to.

A pretrained model that reads a token again expects what followed it before (an induction head: Olsson et al. 2022,
https://arxiv.org/abs/2209.11895). Training this takes millions of tokens. Here, weights of two layers are set instead:

- Every token has a random code. The hidden state holds the token's code, the previous token's and the predicted one's.
- Layer 1 attends to the previous token and adds its code to the hidden state.
- Layer 2 attends to tokens whose previous token is this one, and adds their codes to the prediction.

The model knows nothing else: no words, no grammar, no format of answers. All weights can be trained.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts._reduced_model import cut_tokenizer

VOCABULARY, HEADS, HEAD_DIM = 4096, 4, 64
CODE = 64  # numbers of a token's code
TOKEN, PREVIOUS, PREDICTED = (slice(start, start + CODE) for start in range(0, 3 * CODE, CODE))  # in the hidden state
CONSTANT = 255  # number of the hidden state that is the same for all tokens
CONFIG = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "tie_word_embeddings": False}
CONFIG |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "rope_theta": 5e6}
# Share of each rotary frequency in queries and keys of layer 1, the highest first: together, they tell positions apart.
SHARES = {0: 0.35, 2: 0.25, 4: 0.2, 6: 0.1, 8: 0.1}
LOWEST = range(14, HEAD_DIM // 2)  # frequencies that hardly rotate within a sample; layer 2 compares codes in these
SHARPNESS_1, SHARPNESS_2, VALUE, GAIN = 8.0, 4.0, 0.1, 1.5


def make_copying_model(tokenizer: Path, target: Path) -> None:
    """Write a model with the first merges of a real tokenizer, and its chat template."""
    target.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, target / name)
    new_ids = cut_tokenizer(target, VOCABULARY)
    end_of_text = json.loads((tokenizer / "config.json").read_text())["text_config"]["eos_token_id"]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, eos_token_id=new_ids[end_of_text], **CONFIG))
    set_copying_heads(model)
    model.float().save_pretrained(target)


@torch.no_grad()
def set_copying_heads(model: Qwen3ForCausalLM) -> None:
    """Set the codes of tokens, and both layers; other weights are small."""
    for name, weight in model.named_parameters():
        if not name.endswith("norm.weight"):
            weight.mul_(0.5)
    codes = F.normalize(torch.randn(model.config.vocab_size, CODE), dim=1)
    embeddings = model.model.embed_tokens.weight
    embeddings[:, TOKEN] = codes
    embeddings[:, CONSTANT] = 1
    model.lm_head.weight[:, PREDICTED] += codes
    first, second = (layer.self_attn for layer in model.model.layers)
    _attend_to_previous(first, model.model.rotary_emb.inv_freq)
    _attend_to_same(second)
    for head in range(HEADS):
        in_head = slice(head * HEAD_DIM, head * HEAD_DIM + CODE)
        for layer, output, gain in ((first, PREVIOUS, 1.0), (second, PREDICTED, GAIN)):
            layer.v_proj.weight[in_head, TOKEN] += VALUE * torch.eye(CODE)
            layer.o_proj.weight[output, in_head] += gain / HEADS * torch.eye(CODE)


def _attend_to_previous(layer: torch.nn.Module, frequencies: torch.Tensor) -> None:
    """Queries and keys are constant, and rotated against each other by one position; ``frequencies``: (D / 2,)."""
    amplitudes = torch.zeros(HEAD_DIM // 2)
    amplitudes[list(SHARES)] = torch.tensor(list(SHARES.values())).sqrt()
    query = torch.cat([amplitudes * frequencies.cos(), -amplitudes * frequencies.sin()])
    key = torch.cat([amplitudes, torch.zeros_like(amplitudes)])
    layer.q_proj.weight[:, CONSTANT] += 10 * query.repeat(HEADS)
    layer.k_proj.weight[:, CONSTANT] += 10 * key.repeat(HEADS)
    layer.q_norm.weight.fill_(SHARPNESS_1)
    layer.k_norm.weight.fill_(SHARPNESS_1)


def _attend_to_same(layer: torch.nn.Module) -> None:
    """Queries are the token's code, keys the previous token's, both projected alike, differently in each head."""
    lowest = torch.tensor([*LOWEST, *(HEAD_DIM // 2 + number for number in LOWEST)])
    for head in range(HEADS):
        projection = 5 * torch.randn(len(lowest), CODE) / math.sqrt(CODE)
        layer.q_proj.weight[head * HEAD_DIM + lowest, TOKEN] += projection
        layer.k_proj.weight[head * HEAD_DIM + lowest, PREVIOUS] += projection
    layer.q_norm.weight.fill_(SHARPNESS_2)
    layer.k_norm.weight.fill_(SHARPNESS_2)
