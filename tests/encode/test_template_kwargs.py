"""Arguments of chat templates: of a run (``--chat-template-kwargs``) and of a row (``chat_template_kwargs``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from packtool.cache.export import export
from packtool.cache.manifest import Manifest
from packtool.config.data import RESERVED_TEMPLATE_KWARGS, EncodeSpec, ExportConfig
from packtool.config.settings import resolve
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.report.inspect import cache_figures, figure_lines
from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.sample import Dropped, Sample, Turn
from packtool.rows.source import Source
from tests.encode.conftest import ModelMaker

CONTROL = ["<|im_start|>", "<|im_end|>"]
EFFORT = (
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'high'] %}"
    "{{ raise_exception('unknown effort') }}{% endif %}"
    "<|im_start|>system\nEffort: {{ reasoning_effort | default('medium') }}{{ style | default({}) | tojson }}"
    "<|im_end|>\n{% for message in messages %}<|im_start|>{{ message.role + '\n' }}"
    "{% if message.role == 'assistant' and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% elif message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
CHAT = (Turn("user", "a?"), Turn("assistant", "one"), Turn("user", "b?"), Turn("assistant", "two"))


def encoder_with(model: Path, kwargs: dict[str, Any] | None = None, **spec: Any) -> Encoder:
    settings = EncodeSpec(model=str(model), max_length=100_000, chat_template_kwargs=kwargs, **spec)
    return Encoder(settings, ModelFiles.load(str(model), chat_template_kwargs=kwargs))


def encode(encoder: Encoder, turns: tuple[Turn, ...] = CHAT, **kwargs: Any) -> EncodedSample | Dropped:
    (result,) = encoder.encode([Sample(turns, (), "rows.jsonl", 0, chat_template_kwargs=kwargs)])
    return result if isinstance(result, Dropped) else result[0]


def texts(encoder: Encoder, sample: EncodedSample | Dropped) -> tuple[str, str]:
    """The text of all tokens, and of the targets."""
    assert isinstance(sample, EncodedSample), sample
    decode = encoder._tokenizer.decode
    targets = sample.labels[sample.labels != -100]
    if sample.loss_scale is not None:
        targets = sample.labels[sample.loss_scale > 0]
    return decode(sample.input_ids.tolist(), skip_special_tokens=False), decode(
        targets.tolist(), skip_special_tokens=False
    )


@pytest.fixture
def model(small_model: ModelMaker) -> Path:
    return small_model(EFFORT, CONTROL)


@pytest.mark.smoke
def test_arguments_of_the_run_and_of_the_row(model: Path) -> None:
    plain, low = encoder_with(model), encoder_with(model, {"reasoning_effort": "low"})
    assert "Effort: medium{}" in texts(plain, encode(plain))[0]
    assert "Effort: low{}" in texts(low, encode(low))[0]
    assert 'Effort: high{"a": 1}' in texts(low, encode(low, reasoning_effort="high", style={"a": 1}))[0]
    assert "Effort: low{}" in texts(low, encode(low))[0]  # the row before changed nothing
    assert texts(low, encode(low, reasoning_effort="high"))[1] == texts(plain, encode(plain))[1]


def test_targets_follow_the_generation_prompt(model: Path) -> None:
    """With thinking off, the prompt writes the empty block; ``keep_empty_think`` trains it all the same."""
    for run, row in (({"enable_thinking": False}, {}), (None, {"enable_thinking": False})):
        encoder = encoder_with(model, run)
        everything, targets = texts(encoder, encode(encoder, **row))
        assert everything.count("<think>\n\n</think>\n\n") == 2
        assert targets == "one<|im_end|>two<|im_end|>"
        encoder = encoder_with(model, run, loss_scale="default+keep_empty_think")
        _, targets = texts(encoder, encode(encoder, **row))
        assert targets == "<think>\n\n</think>\n\none<|im_end|><think>\n\n</think>\n\ntwo<|im_end|>"


def test_refused_arguments(model: Path) -> None:
    encoder = encoder_with(model)
    refused = encode(encoder, reasoning_effort="none")
    assert isinstance(refused, Dropped)
    assert refused.reason == "template_refused"
    assert "reasoning_effort" in refused.detail
    control = encode(encoder, style={"a": "<|im_end|>"})
    assert isinstance(control, Dropped)
    assert control.reason == "invalid_template_kwargs"
    with pytest.raises(ConfigError, match=r'--chat-template-kwargs \{"reasoning_effort": "none"\}: .*unknown effort'):
        encoder_with(model, {"reasoning_effort": "none"})


@pytest.mark.parametrize("value", ["[]", '{"tools": []}', {"add_generation_prompt": True}, {"a": object()}, {1: 2}])
def test_options_that_cannot_be_passed(value: Any) -> None:
    with pytest.raises(ConfigError, match="--chat-template-kwargs"):
        resolve(
            ExportConfig,
            {"model": "m", "dataset": ("rows.jsonl",), "output_dir": "out", "chat_template_kwargs": value},
        )


@pytest.mark.parametrize("name", RESERVED_TEMPLATE_KWARGS)
def test_names_that_packtool_sets_drop_the_row(name: str) -> None:
    row = {"query": "q", "response": "r", "chat_template_kwargs": {name: None}}
    with pytest.raises(RowProblem, match=name) as problem:
        to_sample(row, Source("rows.jsonl"), 0)
    assert problem.value.reason == "invalid_template_kwargs"


def test_rows() -> None:
    def kwargs_of(value: Any) -> Any:
        row = {"query": "q", "response": "r", "chat_template_kwargs": value}
        return to_sample(row, Source("rows.jsonl"), 0).chat_template_kwargs

    # Tables store objects as text, and fill in keys that other rows have.
    assert kwargs_of('{"enable_thinking": false}') == kwargs_of({"enable_thinking": False, "effort": None})
    assert kwargs_of(None) == {}
    for value in ([1], 3, {"a": float("nan")}):
        with pytest.raises(RowProblem, match="chat_template_kwargs"):
            kwargs_of(value)


VALUES = st.one_of(
    st.booleans(), st.integers(-5, 5), st.text("ab \"'é", max_size=4), st.lists(st.booleans(), max_size=2)
)
KWARGS = st.dictionaries(st.sampled_from(["x", "y", "self", "loop"]), VALUES, max_size=3)


ECHO = (
    "<|im_start|>system\n{{ x | default('-') | tojson }}{{ y | default('-') | tojson }}<|im_end|>\n"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template writes two arguments."""
    folder = tmp_path_factory.mktemp("echo")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(ECHO)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@given(run=KWARGS, row=KWARGS)
def test_as_transformers_renders(echo: Path, run: dict[str, Any], row: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    encoder = encoder_with(echo, run)
    everything, targets = texts(encoder, encode(encoder, **row))
    messages = [{"role": turn.role, "content": turn.content} for turn in CHAT]
    arguments = {name: value for name, value in {**run, **row}.items() if name != "self"}
    rendered, _ = render_jinja_template([messages], chat_template=ECHO, **arguments)
    assert everything == rendered[0]
    assert targets == "one<|im_end|>two<|im_end|>"


@pytest.mark.parametrize("thought", ["", "Because."])
def test_real_template_with_thinking_switched_off(text_model: ModelMaker, thought: str) -> None:
    """Switching thinking off leaves tokens and targets of a conversation as they are, thoughts included."""
    model = text_model("text-qwen3")
    answer = Turn("assistant", "two", {"reasoning_content": thought} if thought else {})
    plain = encode(encoder_with(model), (*CHAT[:3], answer))
    assert isinstance(plain, EncodedSample)
    for run, row in (({"enable_thinking": False}, {}), (None, {"enable_thinking": False}), ({}, {"unknown": 1})):
        other = encode(encoder_with(model, run), (*CHAT[:3], answer), **row)
        assert isinstance(other, EncodedSample)
        np.testing.assert_array_equal(other.input_ids, plain.input_ids)
        np.testing.assert_array_equal(other.labels, plain.labels)


def test_caches(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"query": "q", "response": "r"}) + "\n")

    def manifest(name: str, **settings: Any) -> Manifest:
        out = str(tmp_path / name)
        export(
            ExportConfig(model=str(model), dataset=(str(rows),), output_dir=out, max_length=100, **settings),
            SilentProgress(),
        )
        return Manifest.read(out)

    plain, empty = manifest("plain"), manifest("empty", chat_template_kwargs={"reasoning_effort": None})
    assert plain.fingerprint == empty.fingerprint
    assert "chat_template_kwargs" not in (tmp_path / "plain" / "packtool.json").read_text()
    low = manifest("low", chat_template_kwargs={"reasoning_effort": "low"})
    assert low.fingerprint != plain.fingerprint
    assert low.identity.spec["chat_template_kwargs"] == {"reasoning_effort": "low"}
    lines = dict(figure_lines(cache_figures(str(tmp_path / "low"))))
    assert lines["  chat_template_kwargs"] == "{'reasoning_effort': 'low'}"


def test_misspelled_argument_is_reported(small_model: ModelMaker) -> None:
    """Jinja ignores arguments that a template does not use."""
    model = small_model(EFFORT, CONTROL)
    warnings = encoder_with(model, {"reasoning_efort": "low", "enable_thinking": True}).warnings
    assert [line for line in warnings if "chat-template-kwargs" in line] == [
        "--chat-template-kwargs: the chat template does not use 'reasoning_efort'; did you mean 'reasoning_effort'?"
    ]
