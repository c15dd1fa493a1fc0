"""Rows that become several samples: turns of models that think, and several accepted responses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedRow, EncodedSample, left_out_of
from packtool.encode.encoder import Encoder
from packtool.encode.media_spans import MediaTokens
from packtool.encode.model_files import ModelFiles
from packtool.encode.prefix_hashes import PrefixHashes, prefix_hashes
from packtool.encode.row_parts import expansion_of
from packtool.errors import RowError
from packtool.rows.forms import to_sample
from packtool.rows.sample import Dropped, MediaRef, Response, RowPart, Sample, Turn
from packtool.rows.source import Source
from tests.encode.conftest import encoder_for
from tests.encode.test_against_processor import cached_encoder, tokenizer_of

# As Qwen3's: thoughts of turns before the last question are left out, those of a loop of tool calls stay, and an
# answer that comes last has at least an empty block of them.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nPROMPTED{% endif %}"
)
SWITCHED = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
# Qwen3 writes nothing into its prompt (or an empty block); Qwen3-VL-Thinking opens the thoughts.
HYBRID, OPENED = THINKING.replace("PROMPTED", SWITCHED), THINKING.replace("PROMPTED", "<think>\n")
KEEPING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY = "<think>//</think>//"
CONTROL = ["<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def assistant(text: str, thought: str | None = None, **turn_options: Any) -> Turn:
    return Turn("assistant", text, {} if thought is None else {"reasoning_content": thought}, **turn_options)


def user(text: str) -> Turn:
    return Turn("user", text)


THREE = (user("a?"), assistant("A", "1"), user("b?"), assistant("B", "2"), user("c?"), assistant("C", "3"))
LOOP = (user("a?"), assistant("call", "1"), Turn("tool", "r"), assistant("A", "2"), user("b?"), assistant("B", "3"))


def row(*turns: Turn, **more: Any) -> Sample:
    return Sample(turns, (), "rows.jsonl", 7, **more)


def text_of(ids: Any) -> str:
    """What tokens say: the tokenizer of these tests has one a byte; control tokens print as [ and ]."""
    text = "".join(BYTES[i] if i < 256 else "[]"[i - 256] for i in ids if i != IGNORE_INDEX)
    return text.replace("Ġ", " ").replace("Ċ", "/").replace("[assistant/", "A:").replace("[user/", "U:")


def texts_of(samples: Any) -> list[tuple[str, str]]:
    assert isinstance(samples, list), samples
    return [(text_of(sample.input_ids), text_of(sample.labels)) for sample in samples]


def parts(samples: Any) -> list[str]:
    return [str(sample.part) for sample in samples]


@pytest.fixture
def encoder(small_model: Any) -> Any:
    model_dirs: dict[str, Path] = {}

    def make(expand: str, template: str = HYBRID, **spec: Any) -> Encoder:
        model_dirs["model"] = small_model(template, CONTROL)
        return encoder_for(model_dirs["model"], expand_turns=expand, **spec)

    return make


def encoded(encoder: Encoder, sample: Sample) -> list[EncodedSample] | Dropped:
    (result,) = encoder.encode([sample])
    return result


def test_every_turn_is_a_sample_with_its_thoughts(encoder: Any) -> None:
    samples = encoded(encoder("true"), row(*THREE))
    assert texts_of(samples) == [
        ("U:a?]/A:<think>/1/</think>//A]/", "<think>/1/</think>//A]"),
        ("U:a?]/A:A]/U:b?]/A:<think>/2/</think>//B]/", "<think>/2/</think>//B]"),
        ("U:a?]/A:A]/U:b?]/A:B]/U:c?]/A:<think>/3/</think>//C]/", "<think>/3/</think>//C]"),
    ]
    assert isinstance(samples, list)
    assert parts(samples) == ["turn 1 of 3", "turn 2 of 3", "turn 3 of 3"]
    assert [len(sample.turns) for sample in samples] == [2, 2, 2]
    unexpanded = encoded(encoder("false"), row(*THREE))
    assert texts_of(unexpanded) == [
        ("U:a?]/A:A]/U:b?]/A:B]/U:c?]/A:<think>/3/</think>//C]/", "A]B]<think>/3/</think>//C]")
    ]


def test_tool_call_loop_is_one_sample_with_auto(encoder: Any) -> None:
    call, answer, last = "<think>/1/</think>//call]", "<think>/2/</think>//A]", "<think>/3/</think>//B]"
    samples = encoded(encoder("auto"), row(*LOOP))
    assert [trained for _, trained in texts_of(samples)] == [call + answer, last]
    assert isinstance(samples, list)
    assert parts(samples) == ["turn 2 of 3", "turn 3 of 3"]
    assert [trained for _, trained in texts_of(encoded(encoder("true"), row(*LOOP)))] == [call, answer, last]


@pytest.mark.parametrize(
    "turns",
    [
        (user("a?"), assistant("A", "1")),
        (user("a?"), assistant("A"), user("b?"), assistant("B")),  # nobody thinks
        (user("a?"), assistant("A"), user("b?"), assistant("B", "2")),  # what is thought last is there
        (user("a?"), assistant("A", "1", loss=False), user("b?"), assistant("B", "2")),  # what is lost is not trained
        (user("a?"), assistant("call", "1"), Turn("tool", "r"), assistant("A", "2")),
    ],
)
def test_rows_without_lost_thoughts_are_unchanged(encoder: Any, turns: tuple[Turn, ...]) -> None:
    (before,), (sample,) = (encoder(expand).encode([row(*turns)])[0] for expand in ("false", "auto"))
    assert texts_of([sample]) == texts_of([before])
    assert (sample.part, sample.borders) == (None, None)


def test_empty_thoughts_count_only_if_trained(encoder: Any) -> None:
    turns = row(*THREE[:2], user("b?"), assistant("B"), user("c?"), assistant("C"))
    assert [trained for _, trained in texts_of(encoded(encoder("auto"), turns))] == ["<think>/1/</think>//A]", "B]C]"]
    samples = encoded(encoder("auto", loss_scale="default+keep_empty_think"), turns)
    assert [trained for _, trained in texts_of(samples)] == ["<think>/1/</think>//A]", f"{EMPTY}B]", f"{EMPTY}C]"]


@pytest.mark.parametrize("scale", ["default", "last_round"])
def test_loss_settings_of_turns_apply(encoder: Any, scale: str) -> None:
    """A turn that is not trained in the row has no sample; a weight is its own."""
    turns = (user("a?"), assistant("A", "1", loss=False), user("b?"), assistant("B", "2", loss_scale=0.0), *THREE[4:])
    turns += (user("d?"), assistant("D", "4", loss=True), user("e?"), assistant("E", "5", loss_scale=2.0))
    samples = encoded(encoder("auto", loss_scale=scale), row(*turns))
    assert isinstance(samples, list)
    expected = ["turn 3 of 5", "turn 4 of 5", "turn 5 of 5"]
    assert parts(samples) == (expected if scale == "default" else expected[1:])
    assert samples[-1].loss_scale is not None
    assert set(samples[-1].loss_scale.tolist()) == {0, 2}


def test_text_after_the_last_answer_is_excluded(encoder: Any) -> None:
    for expand in ("true", "auto"):
        samples = encoded(encoder(expand), row(*THREE[:2], user("b?")))
        assert texts_of(samples) == [("U:a?]/A:<think>/1/</think>//A]/", "<think>/1/</think>//A]")]


def test_texts_and_fully_trained_rows_are_not_expanded(encoder: Any) -> None:
    text = Sample((Turn("assistant", "some text"),), (), "t.txt", 0, is_text=True)
    assert texts_of(encoded(encoder("true"), text)) == [("some text", "some text")]
    (unexpanded,) = texts_of(encoded(encoder("true"), row(*THREE, loss_scale="all")))
    assert unexpanded[0] == unexpanded[1]
    assert len(texts_of(encoded(encoder("true"), row(*THREE, loss_scale="last_round")))) == 1


def test_overlong_turn_is_dropped_alone(encoder: Any) -> None:
    samples = encoded(encoder("true", max_length=80), row(*THREE))
    assert isinstance(samples, EncodedRow)
    assert parts(samples) == ["turn 1 of 3", "turn 2 of 3"]
    (lost,) = left_out_of(samples)
    assert (lost.reason, lost.part) == ("over_max_length", RowPart(3, 3))
    assert json.loads(lost.to_json())["part"] == "turn 3 of 3"
    dropped = encoded(encoder("true", max_length=10), row(*THREE))
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, dropped.row, dropped.part) == ("over_max_length", 7, None)
    assert "turn 1 of 3: " in dropped.detail
    with pytest.raises(RowError, match="turn 3 of 3"):
        encoded(encoder("true", max_length=80, truncation_strategy="raise"), row(*THREE))


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_turns_keep_their_boundaries(encoder: Any, side: str) -> None:
    samples = encoded(encoder("true", max_length=45, truncation_strategy=side), row(*THREE))
    assert isinstance(samples, list)
    for sample in samples:
        assert sample.borders is not None
        borders = sample.borders.tolist()
        assert borders == sorted(set(borders))
        assert borders[-1] <= sample.length
        assert set(sample.turns.tolist()) - {1} <= {*borders, 1}


def test_media_of_later_turns_are_not_in_earlier_samples(small_model: Any, tmp_path: Path) -> None:
    from PIL import Image

    control = [*CONTROL, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    model = small_model(HYBRID, control, {"model_type": "qwen2_vl", "vision_config": {}, "image_token_id": 260})
    paths = []
    for index in range(3):
        Image.new("RGB", (8 + 8 * index, 8)).save(tmp_path / f"{index}.png")
        paths.append(MediaRef(str(tmp_path / f"{index}.png")))
    turns = (user("<image>?"), assistant("A", "1"), user("<image><image>?"), assistant("B", "2"))
    sample = replace(row(*turns), images=tuple(paths))
    (samples,) = encoder_for(model, expand_turns="true").encode([sample])
    assert isinstance(samples, list), samples
    assert [[image.path for image in each.images] for each in samples] == [
        [paths[0].path],
        [path.path for path in paths],
    ]


def shared_lengths(one: EncodedSample, other: EncodedSample) -> tuple[int, int]:
    """Tokens that two samples begin with in common, and those of the longest prefix that hashes tell of."""
    same = int(np.argmin(one.input_ids == other.input_ids[: one.length]))
    (hashes, lengths), (others, _) = (
        (hashes.hashes.tolist(), hashes.lengths.tolist()) for hashes in map(hashes_of, (one, other))
    )
    return same, max(length for length, digest in zip(lengths, hashes, strict=True) if digest in others)


def hashes_of(sample: EncodedSample) -> PrefixHashes:
    return prefix_hashes([sample], MediaTokens.of({}))[1]


@pytest.mark.parametrize("template", [HYBRID, OPENED])
def test_samples_of_a_row_share_their_common_turns(encoder: Any, template: str) -> None:
    samples = encoded(encoder("true", template), row(*THREE))
    assert isinstance(samples, list)
    for one, other in itertools.pairwise(samples):
        same, num_hashed = shared_lengths(one, other)
        assert num_hashed == same == int(one.turns[0]) - len("<think>/") * (template == OPENED)


def test_line_merging_with_the_header_keeps_the_prefix(data: Path, text_model: Any) -> None:
    encoder = cached_encoder(text_model("text-qwen3"), expand_turns="auto")
    samples = encoded(encoder, row(user("a?"), assistant("\n\nA", "1"), *THREE[2:4]))
    assert isinstance(samples, list)
    same, num_hashed = shared_lengths(samples[0], samples[1])
    assert same - 1 <= num_hashed <= same < int(samples[0].turns[0])


def test_auto_expands_only_templates_that_drop_thoughts(small_model: Any) -> None:
    """Recognized by what they render: in a key or in the text, whatever the template is called."""
    inline = KEEPING.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}")
    shows_none = KEEPING.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    keeping = THINKING.replace("loop.index0 > ns.last and", "")
    for template, expected in ((HYBRID, "auto"), (OPENED, "auto"), (inline, "auto"), (KEEPING, "false")):
        files = ModelFiles.load(str(small_model(template, CONTROL)))
        assert expansion_of("auto", files) == expected
        assert expansion_of("true", files) == "true"
    for template in (shows_none, keeping):
        assert expansion_of("auto", ModelFiles.load(str(small_model(template, CONTROL)))) == "false"


def test_note_states_the_choice_of_auto(encoder: Any) -> None:
    assert "becomes several samples" in encoder("auto").warnings[-1]
    assert "changes nothing" in encoder("auto", KEEPING).warnings[-1]


def test_responses_share_the_prompt_and_have_weights(encoder: Any) -> None:
    answers = (Response((assistant("x"),)), Response((assistant("y", "why"),), 0.5))
    samples = encoded(encoder("false", KEEPING), row(user("q?"), assistant("H"), user("r?"), responses=answers))
    assert texts_of(samples) == [("U:q?]/A:H]/U:r?]/A:x]/", "H]x]"), ("U:q?]/A:H]/U:r?]/A:y]/", "y]")]
    assert isinstance(samples, list)
    assert parts(samples) == ["response 1 of 2", "response 2 of 2"]
    assert samples[0].loss_scale is None
    assert samples[1].loss_scale is not None
    assert samples[1].loss_scale[samples[1].labels != IGNORE_INDEX].tolist() == [0.5, 0.5]
    every = encoded(
        encoder("false", KEEPING, loss_scale="all"), row(user("r?"), assistant("H"), user("s?"), responses=answers)
    )
    assert [trained for _, trained in texts_of(every)] == ["U:r?]/A:H]/U:s?]/A:x]/", "y]"]
    (single,) = texts_of(encoded(encoder("false", KEEPING), row(user("r?"), responses=answers[:1])))
    assert single == ("U:r?]/A:x]/", "x]")


def test_turns_and_responses_at_once(encoder: Any) -> None:
    answers = (Response((assistant("x", "3"),)), Response((assistant("y", "4"),), 2.0))
    samples = encoded(encoder("auto"), row(*THREE[:5], responses=answers))
    assert isinstance(samples, list)
    assert [trained for _, trained in texts_of(samples)] == [
        f"<think>/{thought}/</think>//{text}]" for thought, text in ("1A", "2B", "3x", "4y")
    ]
    assert parts(samples)[1:] == [
        "turn 2 of 3, response 1 of 2",
        "turn 3 of 3, response 1 of 2",
        "response 2 of 2",
    ]


TURNS = st.builds(
    assistant,
    st.text("xyz", min_size=1, max_size=3),
    st.none() | st.text("pqr", min_size=1, max_size=3),
    loss=st.sampled_from([None, None, False, True]),
)
STEPS = st.tuples(st.just(user("u?")) | st.just(Turn("tool", "t")), TURNS)


def rendered(turns: Sequence[Turn]) -> str:
    """A conversation as ``HYBRID`` writes it, up to the end of its last turn."""
    last = max(turn_index for turn_index, turn in enumerate(turns) if turn.role == "user")
    text = ""
    for turn_index, turn in enumerate(turns):
        thought = turn.extra.get("reasoning_content")
        thinks = turn.role == "assistant" and turn_index > last and (turn_index == len(turns) - 1 or thought)
        text += f"[{turn.role}/" + (f"<think>/{thought or ''}/</think>//" if thinks else "") + f"{turn.content}]/"
    return text.replace("[assistant/", "A:").replace("[user/", "U:").removesuffix("/")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first_turn=TURNS, more=st.lists(STEPS, max_size=4), expand=st.sampled_from(["true", "auto"]))
def test_every_turn_is_trained_once_as_the_last_turn(
    small_model: Any, first_turn: Turn, more: list[tuple[Turn, Turn]], expand: str
) -> None:
    """But for empty blocks of thoughts, which ``auto`` does not expand a row for."""
    turns = (user("u?"), first_turn, *(turn for step in more for turn in step))
    samples = encoded(_encoder(small_model, expand), row(*turns))
    trained = [i for i, turn in enumerate(turns) if turn.role == "assistant" and turn.loss is not False]
    if not trained:
        assert isinstance(samples, Dropped)
        return
    assert isinstance(samples, list)
    ends = [(sample, int(end)) for sample in samples for end in sample.turns[1::2]]
    for (sample, end), turn_index in zip(ends, trained, strict=True):
        alone_text, here = rendered(turns[: turn_index + 1]), text_of(sample.input_ids[:end])
        assert here.replace(EMPTY, "") == alone_text.replace(EMPTY, "")
        if expand == "true":
            assert (here, text_of(sample.input_ids)) == (alone_text, f"{alone_text}/")
        begin = int(sample.turns[list(sample.turns).index(end) - 1])
        thought, text = turns[turn_index].extra.get("reasoning_content"), f"{turns[turn_index].content}]"
        target = f"<think>/{thought}/</think>//{text}" if thought else text
        assert text_of(sample.labels[begin:end]) == target
    assert sum(text_of(sample.labels).count("]") for sample in samples) == len(trained)


@cache
def _encoder(make: Any, expand: str) -> Encoder:
    return encoder_for(make(HYBRID, CONTROL), expand_turns=expand)


def _rows(data: Path) -> list[dict[str, Any]]:
    lines = (data / "tool_reasoning_50.jsonl").read_text().splitlines()
    return [parsed for parsed in map(json.loads, lines) if len(parsed["messages"]) > 5]


@pytest.mark.parametrize("expand", ["true", "auto"])
def test_turns_equal_the_template_output(data: Path, text_model: Any, expand: str) -> None:
    """Each sample is the template's conversation up to its turn, and trains what follows the prompt."""
    directory = text_model("text-qwen3")
    tokenizer = tokenizer_of(directory)
    rows = _rows(data)
    encoder = cached_encoder(directory, expand_turns=expand)
    results = encoder.encode([to_sample(each, Source("rows.jsonl"), i) for i, each in enumerate(rows)])
    num_trained = 0
    for raw, result in zip(rows, results, strict=True):
        assert isinstance(result, EncodedRow)
        messages = [{"content": "", **{k: v for k, v in m.items() if v is not None}} for m in raw["messages"]]
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]

        def render(stop: int, messages: Any = messages, raw: Any = raw, **more: Any) -> str:
            return tokenizer.apply_chat_template(messages[:stop], tools=raw["tools"], tokenize=False, **more)

        trained = []
        for sample in result:
            assert sample.part is not None
            rendered = render(places[sample.part.turn - 1] + 1)
            np.testing.assert_array_equal(sample.input_ids, tokenizer(rendered, add_special_tokens=False)["input_ids"])
            for start, end in sample.turns.reshape(-1, 2):
                assert (sample.labels[start:end] == sample.input_ids[start:end]).all()
                trained.append((int(start), sample.input_ids[:end].tolist()))
            assert (sample.labels != IGNORE_INDEX).sum() == np.diff(sample.turns.reshape(-1, 2)).sum()
        assert len(trained) == len(places)
        for place, (start, ids) in zip(places, trained, strict=True):
            prompt = tokenizer(render(place, add_generation_prompt=True), add_special_tokens=False)["input_ids"]
            answered = tokenizer(render(place + 1).rstrip("\n"), add_special_tokens=False)["input_ids"]
            assert (start, ids) == (len(prompt), answered)
        num_trained += len(trained)
    assert num_trained > 50
