"""``--chat-template mistral-common``: tokens equal those of mistral-common, and checkpoints keep the template."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from packtool.config.data import MISTRAL_COMMON, EncodeSpec
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.rows.forms import to_sample
from packtool.rows.sample import Dropped
from packtool.rows.source import Source
from tests.encode.conftest import ModelMaker

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PAIRS = (
    ("t", "h"),
    ("h", "e"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    (" ", "t"),
    ("th", "e"),
    (" ", "the"),
    ("\n", "\n"),
)
"""Pairs of pieces that are merged, by rank."""
SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
    "[ARGS]",
    "[CALL_ID]",
    "[THINK]",
    "[/THINK]",
]
"""Special tokens of version 13; earlier ones lack the last two."""


def write_tokenizers(directory: Path, version: str) -> None:
    """Write the same small byte-level vocabulary as ``tekken.json`` and as ``tokenizer.json``."""
    pieces = [bytes([value]) for value in range(256)] + ["".join(pair).encode() for pair in PAIRS]
    names = SPECIAL if version == "v13" else SPECIAL[:-2]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(names)]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    size = {"default_vocab_size": len(pieces) + len(names), "default_num_special_tokens": len(names)}
    config = {"pattern": PATTERN, "num_vocab_tokens": len(pieces), "version": version, **size}
    tekken = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (directory / "tekken.json").write_text(json.dumps(tekken), encoding="utf-8")

    ids = {text: number for number, text in enumerate([*names, *map(_byte_level, pieces)])}
    merges = [(_byte_level(left.encode()), _byte_level(right.encode())) for left, right in PAIRS]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names])
    tokenizer.save(str(directory / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(roles), encoding="utf-8")


def _byte_level(piece: bytes) -> str:
    return "".join(_BYTE_CHARACTERS[byte] for byte in piece)


def _byte_characters() -> dict[int, str]:
    """Return GPT-2's characters of bytes: printable bytes stand for themselves, others follow from U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()


@pytest.fixture(scope="module", params=["v3", "v7", "v11", "v13"])
def mistral(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with both tokenizers; the model's own template adds a default system prompt."""
    pytest.importorskip("mistral_common.integrations.chat_templates.chat_templates")
    directory = tmp_path_factory.mktemp(str(request.param))
    write_tokenizers(directory, request.param)
    (directory / "config.json").write_text(json.dumps({"model_type": "mistral", "vocab_size": 512}), encoding="utf-8")
    (directory / "chat_template.jinja").write_text("[SYSTEM_PROMPT]Today is Monday.[/SYSTEM_PROMPT]", encoding="utf-8")
    return directory


TEXTS = st.text(st.sampled_from("aehint r\n.é你"), min_size=1, max_size=30).map(lambda text: f"t{text}r")


@given(system=st.none() | TEXTS, turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_equal_those_of_mistral_common(mistral: Path, system: str | None, turns: list[tuple[str, str]]) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    peer = MistralTokenizer.from_file(str(mistral / "tekken.json"), mode=ValidationMode.finetuning)
    expected = peer.encode_chat_completion(ChatCompletionRequest.from_openai(messages=messages)).tokens

    encoder = _encoder(mistral)
    (result,) = encoder.encode([to_sample({"messages": messages}, Source("rows.jsonl"), 0)])
    assert not isinstance(result, Dropped), result
    ids, labels = result[0].input_ids.tolist(), result[0].labels.tolist()
    assert ids == expected
    answers = "".join(f"{answer}</s>" for _, answer in turns)
    targets = [label for label in labels if label != -100]
    assert encoder._tokenizer.decode(targets, skip_special_tokens=False) == answers


def _encoder(model: Path) -> Encoder:
    spec = EncodeSpec(model=str(model), max_length=100_000, chat_template=MISTRAL_COMMON)
    return Encoder(spec, ModelFiles.load(str(model), MISTRAL_COMMON))


def test_the_own_template_is_replaced(small_model: ModelMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("[INST]{{ messages[0].content }}[/INST]", ["[INST]", "[/INST]"])
    (model / "tekken.json").write_text("{}", encoding="utf-8")
    library: Any = ModuleType("chat_templates")
    library.convert_tokenizer_to_chat_template = lambda path: f"{{# {Path(path).name} #}}{{{{ messages }}}}"
    _install(monkeypatch, library)
    files = ModelFiles.load(str(model), MISTRAL_COMMON)
    assert files.chat_template == files.other_template == "{# tekken.json #}{{ messages }}"
    spec = EncodeSpec(model=str(model), chat_template=MISTRAL_COMMON)
    assert spec.recorded()["chat_template"] == MISTRAL_COMMON


@pytest.mark.parametrize(
    ("file", "error", "message"),
    [
        (None, None, "has no tekken.json, nor tokenizer.model.v3 or the like"),
        ("tekken.json", KeyError("config"), r"tekken.json in .* cannot be read: 'config'"),
        ("tokenizer.model.v3", AssertionError("vocab"), r"tokenizer.model.v3 in .* cannot be read: vocab"),
    ],
)
def test_unusable_tokenizer_files_are_refused(
    small_model: ModelMaker, monkeypatch: pytest.MonkeyPatch, file: str | None, error: Exception | None, message: str
) -> None:
    model = small_model("[INST]{{ messages[0].content }}[/INST]", ["[INST]", "[/INST]"])
    if file is not None:
        (model / file).write_text("{}", encoding="utf-8")

    def convert(path: str) -> str:
        assert error is not None
        raise error

    library: Any = ModuleType("chat_templates")
    library.convert_tokenizer_to_chat_template = convert
    _install(monkeypatch, library)
    with pytest.raises(ConfigError, match=f"--chat-template mistral-common: .*{message}"):
        ModelFiles.load(str(model), MISTRAL_COMMON)


def _install(monkeypatch: pytest.MonkeyPatch, library: ModuleType) -> None:
    for name in ("mistral_common", "mistral_common.integrations", "mistral_common.integrations.chat_templates"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "mistral_common.integrations.chat_templates.chat_templates", library)
