from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.cache.output_dir import identity_of
from packtool.config.data import ExportConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.families import MediaLimits
from packtool.encode.loss_scale import loss_scale_of, parse_loss_scale
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError
from packtool.rows.sample import Sample, Turn
from tests.encode.conftest import ModelMaker, encoder_for

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Without a switch; thinking when nothing is said (Qwen3); the prompt opens the thoughts itself (Qwen3.5).
SWITCH = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
QWEN3 = CHATML.replace("assistant\n{% endif %}", f"assistant\n{SWITCH}{{% endif %}}{{% endif %}}")
QWEN3_5 = QWEN3.replace("</think>\n\n{% endif %}", "</think>\n\n{% else %}<think>\n{% endif %}")
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture
def model(small_model: Any) -> str:
    return str(small_model(CHATML, ["<|im_start|>", "<|im_end|>"]))


def encoded(model: str, *turns: Turn, scale: str = "default", row_scale: str | None = None) -> EncodedSample:
    encoder: Encoder = encoder_for(Path(model), loss_scale=scale)
    (result,) = encoder.encode([Sample(turns, (), "rows.jsonl", 0, loss_scale=row_scale)])
    assert isinstance(result, list), result
    return result[0]


def trained_text(sample: EncodedSample) -> str:
    """Bytes of the trained tokens; the tokenizer of these tests has one token a byte, control tokens print as #."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    text = "".join(alphabet[i] if i < 256 else "#" for i in sample.labels if i != -100)
    return text.replace("Ġ", " ").replace("Ċ", "\n")


def test_rules_apply_to_an_answer_that_has_control_tokens_and_no_end(small_model: Any) -> None:
    calls = "{% for call in message.tool_calls or [] %}<|call|>{{ call.name }}{% endfor %}"
    end = "{% if not message.tool_calls %}<|im_end|>\n{% endif %}"
    template = CHATML.replace("<|im_end|>\n", calls + end)
    model = small_model(template, ["<|im_start|>", "<|im_end|>", "<|call|>"])
    turns = (Turn("user", "a?"), Turn("assistant", "one", {"tool_calls": [{"name": "f"}]}))
    assert trained_text(encoded(model, *turns, scale="ignore_empty_think")) == "one#f"


CHAT = (Turn("user", "a?"), Turn("assistant", "one"), Turn("user", "b?"), Turn("assistant", "two"))


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("default", "one#two#"),
        ("last_round", "two#"),
        ("all", "#user\na?#\n#assistant\none#\n#user\nb?#\n#assistant\ntwo#\n"),
    ],
)
def test_bases(model: str, scale: str, expected: str) -> None:
    sample = encoded(model, *CHAT, scale=scale)
    assert trained_text(sample) == expected
    assert sample.loss_scale is None
    # Training can choose among the turns whatever the export's choice was.
    assert len(sample.turns) == 4
    assert trained_text(encoded(model, *CHAT, scale="default", row_scale=scale)) == expected


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("default+train_newline", "one#\ntwo#\n"),
        ("train_newline", "one#\ntwo#\n"),
        ("last_round+train_newline", "two#\n"),
        ("all+train_newline", "#user\na?#\n#assistant\none#\n#user\nb?#\n#assistant\ntwo#\n"),
    ],
)
def test_newline_after_a_turn_is_trained(model: str, scale: str, expected: str) -> None:
    sample = encoded(model, *CHAT, scale=scale)
    assert trained_text(sample) == expected
    assert sample.loss_scale is None
    assert np.array_equal(sample.turns, encoded(model, *CHAT).turns)
    marked = Turn("assistant", "two", loss=False)
    assert trained_text(encoded(model, *CHAT[:3], marked, scale="default+train_newline")) == "one#\n"


def test_newline_has_the_weight_of_its_message(model: str) -> None:
    weighted = Turn("assistant", "one", loss_scale=0.5)
    sample = encoded(model, CHAT[0], weighted, *CHAT[2:], scale="default+train_newline")
    assert trained_text(sample) == "one#\ntwo#\n"
    assert sample.loss_scale is not None
    assert sample.loss_scale[sample.labels != -100].tolist() == [0.5] * 5 + [1.0] * 5


def test_newline_is_trained_only_where_the_template_writes_white_space(small_model: ModelMaker) -> None:
    template = CHATML.replace("<|im_end|>\n", "<|im_end|>")
    model = str(small_model(template, ["<|im_start|>", "<|im_end|>"]))
    assert trained_text(encoded(model, *CHAT, scale="default+train_newline")) == "one#two#"


def test_loss_setting_of_a_message_takes_precedence(model: str) -> None:
    one, two = Turn("assistant", "one", loss=True), Turn("assistant", "two", loss=False)
    assert trained_text(encoded(model, CHAT[0], one, CHAT[2], CHAT[3], scale="last_round")) == "one#two#"
    sample = encoded(model, CHAT[0], CHAT[1], CHAT[2], two)
    assert trained_text(sample) == "one#"
    assert len(sample.turns) == 2
    half = encoded(model, CHAT[0], Turn("assistant", "one", loss_scale=0.5), CHAT[2], CHAT[3])
    assert half.loss_scale is not None
    assert set(half.loss_scale[half.labels != -100].tolist()) == {0.5, 1.0}


def weights_of(sample: EncodedSample) -> list[float]:
    assert sample.loss_scale is not None
    return [float(weight) for weight in sample.loss_scale[sample.labels != -100]]


def test_keywords_weight_themselves_and_the_following_text(model: str) -> None:
    answer = "Thought:t\nAction:go\nObservation:o\nFinal Answer:f"
    sample = encoded(model, Turn("user", "?"), Turn("assistant", answer), scale="react")
    assert trained_text(sample) == "Thought:t\nAction:go\nObservation:Final Answer:f#"
    expected = [1.0] * len("Thought:t\n") + [2.0] * len("Action:go\nObservation:") + [1.0] * len("Final Answer:f#")
    assert weights_of(sample) == expected


def test_patterns_weight_their_matches(model: str) -> None:
    answer = "well <tool_call>\nx\n</tool_call> ok"
    sample = encoded(model, Turn("user", "?"), Turn("assistant", answer), scale="hermes")
    weights = weights_of(sample)
    assert weights == [1.0] * 5 + [2.0] * len("<tool_call>\nx\n</tool_call>") + [1.0] * 4


@pytest.mark.parametrize(
    ("answer", "expected"), [("<think>\n\n</think>\n\nyes", "yes#"), ("<think>\nhm\n</think>\n\nyes", None)]
)
def test_empty_thoughts_are_excluded(model: str, answer: str, expected: str | None) -> None:
    turns = (*CHAT[:2], Turn("user", "?"), Turn("assistant", answer))
    sample = encoded(model, *turns, scale="last_round+ignore_empty_think")
    assert trained_text(sample) == (expected or f"{answer}#")
    assert sample.loss_scale is None
    assert trained_text(encoded(model, *turns, scale="last_round_with_ignore_empty_think")) == trained_text(sample)


@pytest.mark.parametrize("text", ["❤Action:go", "émoji 🙂 Action: x", "Action:"])
def test_weights_align_with_characters_in_any_script(model: str, text: str) -> None:
    sample = encoded(model, Turn("user", "?"), Turn("assistant", text), scale="react")
    num_before = len(text.partition("Action:")[0].encode())
    weights = weights_of(sample)
    assert weights[:num_before] == [1.0] * num_before
    assert set(weights[num_before:]) == {2.0}


def test_answer_without_keywords_ignores_the_rule(model: str) -> None:
    sample = encoded(model, Turn("user", "?"), Turn("assistant", "plain"), scale="react")
    assert trained_text(sample) == "plain#"
    assert sample.loss_scale is None


def test_unknown_names_are_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        parse_loss_scale("hermess")
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_loss_scale("all+last_round")
    with pytest.raises(ConfigError, match="none of default, last_round, all"):
        encoded(model, *CHAT, scale="nothing")
    assert parse_loss_scale("react").base == "default"


def test_pretraining_texts_are_trained_completely(model: str) -> None:
    encoder = encoder_for(Path(model))
    (result,) = encoder.encode([Sample((Turn("assistant", "some <|im_end|> text"),), (), "t.txt", 0, is_text=True)])
    assert isinstance(result, list)
    np.testing.assert_array_equal(result[0].labels, result[0].input_ids)
    assert (result[0].input_ids < 256).all()  # control tokens in a text are text


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        (CHATML, f"{EMPTY}yes", f"{EMPTY}yes#"),
        (QWEN3, f"{EMPTY}yes", "yes#"),
        (QWEN3, "<think></think>yes", "yes#"),
        (QWEN3, "<think>\nhm\n</think>\n\nyes", "<think>\nhm\n</think>\n\nyes#"),
        (QWEN3, f"no {EMPTY}yes", f"no {EMPTY}yes#"),
        # The generation prompt ends with "<think>\n", so what the model says begins behind it.
        (QWEN3_5, f"{EMPTY}yes", "yes#"),
        (QWEN3_5, "<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes#"),
    ],
)
@pytest.mark.parametrize("loss", [None, True])
def test_empty_thoughts_of_hybrid_models_carry_no_loss(
    small_model: ModelMaker, template: str, answer: str, expected: str, loss: bool | None
) -> None:
    model = str(small_model(template, ["<|im_start|>", "<|im_end|>"]))
    turns = (Turn("user", "?"), Turn("assistant", answer, loss=loss))
    sample = encoded(model, *turns)
    assert trained_text(sample) == expected
    assert sample.loss_scale is None
    assert trained_text(encoded(model, *turns, row_scale="last_round")) == expected
    encoded_row = encoded(model, *turns, scale="default+keep_empty_think")
    assert trained_text(encoded_row) in (f"{answer}#", f"{answer}#".removeprefix("<think>\n"))
    warnings = encoder_for(Path(model)).warnings
    assert any("default+keep_empty_think trains it" in line for line in warnings) == (template != CHATML)


@pytest.mark.parametrize("strategy", ["left", "right"])
def test_long_answers_of_hybrid_models_are_truncated(text_model: ModelMaker, strategy: str) -> None:
    """Only the ends of very long texts are tokenized, but not with a rule, which the model adds here."""
    turns = (Turn("user", "Why?"), Turn("assistant", "So it is, and so on. " * 99))
    sample = Sample(turns, (), "rows.jsonl", 0)
    model = text_model("text-qwen3")
    (all_tokens,) = encoder_for(model, max_length=9999).encode([sample])
    (truncated,) = encoder_for(model, max_length=40, truncation_strategy=strategy).encode([sample])
    assert isinstance(all_tokens, list), all_tokens
    assert isinstance(truncated, list), truncated
    expected = all_tokens[0].input_ids[-40:] if strategy == "left" else all_tokens[0].input_ids[:40]
    assert truncated[0].input_ids.tolist() == expected.tolist()


def test_templates_and_the_rule_of_ms_swift(text_model: ModelMaker, data: Path) -> None:
    """Qwen3's template writes an empty block before each last answer without thoughts."""
    hybrid = {
        name: ModelFiles.load(str(text_model(name))).is_hybrid_thinking
        for name in ("text-qwen3", "text-qwen3_instruct_2507", "text-qwen2_5")
    }
    assert hybrid == {"text-qwen3": True, "text-qwen3_instruct_2507": False, "text-qwen2_5": False}
    for name in ("qwen2.5-vl", "qwen3-vl", "qwen3-omni"):
        assert not ModelFiles.load(str(data / "tokenizers" / name)).is_hybrid_thinking
    model = text_model("text-qwen3")
    tokenizer = encoder_for(model)._chunk_tokenizer._tokenizer
    for answer in ("Yes.", "<think>\nHm.\n</think>\n\nYes.", f"{EMPTY}Yes."):
        rendered = answer if answer.startswith("<think>") else EMPTY + answer
        sample = encoded(str(model), Turn("user", "?"), Turn("assistant", answer))
        target_text = tokenizer.decode(sample.labels[sample.labels != -100].tolist(), skip_special_tokens=False)
        assert target_text == re.sub(r"^<think>\s*</think>\s*", "", rendered) + "<|im_end|>"


def test_caches_with_different_labels_have_different_identities(small_model: ModelMaker) -> None:
    def recorded(template: str, loss_scale: str) -> str:
        model = str(small_model(template, ["<|im_start|>", "<|im_end|>"]))
        config = ExportConfig(model=model, max_length=9, dataset=("a",), output_dir="b", loss_scale=loss_scale)
        return str(identity_of(config, ModelFiles.load(model), MediaLimits()).spec["loss_scale"])

    assert recorded(CHATML, "default") == "default"
    assert recorded(QWEN3, "default") == "default+ignore_empty_think"
    assert recorded(QWEN3, "default+keep_empty_think") == "default+keep_empty_think"
    assert loss_scale_of("last_round_with_ignore_empty_think", True) == "last_round_with_ignore_empty_think"
    assert loss_scale_of("hermes", True) == "hermes+ignore_empty_think"
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_loss_scale("ignore_empty_think+keep_empty_think")
