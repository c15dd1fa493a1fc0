"""Templates of which each turn ends where the next one opens, as GLM's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.encode.template import ended_template
from packtool.errors import ConfigError
from packtool.rows.forms import to_sample
from packtool.rows.source import Source
from tests.cache.conftest import model as model
from tests.encode.conftest import encoder_for

ROLES = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
TEMPLATE = """[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' %}<|assistant|>
{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|>
{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


@pytest.fixture(scope="module")
def glm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory with such a template and the tokens that open its turns."""
    folder = tmp_path_factory.mktemp("glm") / "model"
    shutil.copytree(model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(role, special=True, normalized=False) for role in ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    stops = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


def trained_texts(encoder: Encoder, messages: list[dict[str, object]]) -> tuple[str, list[str]]:
    """The whole of a row, and what is trained of each turn."""
    ((sample,),) = encoder.encode([to_sample({"messages": messages}, Source("rows.json", form="messages"), 0)])

    def text_of(start: int, stop: int) -> str:
        text: str = encoder._tokenizer.decode(sample.input_ids[start:stop].tolist(), skip_special_tokens=False)
        return text

    spans = sample.turns.reshape(-1, 2).tolist()
    assert sorted((sample.labels >= 0).nonzero()[0]) == [at for span in spans for at in range(*span)]
    return text_of(0, sample.length), [text_of(*span) for span in spans]


def test_answer_ends_with_the_next_turn_marker(glm: Path) -> None:
    encoder = encoder_for(glm, max_length=1000)
    question = {"role": "user", "content": "Why <|user|>?"}
    text, turns = trained_texts(
        encoder,
        [question, {"role": "assistant", "content": "So."}, question, {"role": "assistant", "content": "Thus."}],
    )
    assert turns == ["So.<|user|>", "Thus.<|user|>"]
    assert text.endswith("<|assistant|>\nThus.<|user|>")
    assert any("generation stops at <|user|>" in warning for warning in encoder.warnings)


def test_tool_call_ends_with_the_tool_turn_marker(glm: Path) -> None:
    encoder = encoder_for(glm, max_length=1000)
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    question, tool_turn = {"role": "user", "content": "Why?"}, {"role": "tool", "content": "42"}
    _, turns = trained_texts(encoder, [question, called, tool_turn, {"role": "assistant", "content": "So."}])
    assert turns == ["<tool_call>look</tool_call><|observation|>", "So.<|user|>"]
    assert trained_texts(encoder, [question, called])[1] == turns[:1]


def test_answers_end_only_at_stop_tokens(glm: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(glm, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="does not open and end the assistant's turns with control tokens"):
        encoder_for(tmp_path / "model")
    own_template = ModelFiles.load(str(model)).chat_template
    assert ended_template(own_template, {}, lambda: ("<|im_start|>", "<|im_end|>")) == (own_template, "")
    assert ended_template("{% broken", {}, tuple) == ("{% broken", "")
    assert ended_template("", {}, tuple) == ("", "")
