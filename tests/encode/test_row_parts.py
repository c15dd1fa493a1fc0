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


def said(text: str, thought: str | None = None, **own: Any) -> Turn:
    return Turn("assistant", text, {} if thought is None else {"reasoning_content": thought}, **own)


def asked(text: str) -> Turn:
    return Turn("user", text)


THREE = (asked("a?"), said("A", "1"), asked("b?"), said("B", "2"), asked("c?"), said("C", "3"))
LOOP = (asked("a?"), said("call", "1"), Turn("tool", "r"), said("A", "2"), asked("b?"), said("B", "3"))


def row(*turns: Turn, **more: Any) -> Sample:
    return Sample(turns, (), "rows.jsonl", 7, **more)


def text_of(ids: Any) -> str:
    """What tokens say: the tokenizer of these tests has one a byte; control tokens print as [ and ]."""
    text = "".join(BYTES[i] if i < 256 else "[]"[i - 256] for i in ids if i != IGNORE_INDEX)
    return text.replace("Ġ", " ").replace("Ċ", "/").replace("[assistant/", "A:").replace("[user/", "U:")


def shown(samples: Any) -> list[tuple[str, str]]:
    assert isinstance(samples, list), samples
    return [(text_of(sample.input_ids), text_of(sample.labels)) for sample in samples]


def parts(samples: Any) -> list[str]:
    return [str(sample.part) for sample in samples]


@pytest.fixture
def encoder(small_model: Any) -> Any:
    made: dict[str, Path] = {}

    def make(expand: str, template: str = HYBRID, **spec: Any) -> Encoder:
        made["model"] = small_model(template, CONTROL)
        return encoder_for(made["model"], expand_turns=expand, **spec)

    return make


def encoded(encoder: Encoder, sample: Sample) -> list[EncodedSample] | Dropped:
    (found,) = encoder.encode([sample])
    return found


def test_every_turn_is_a_sample_with_its_thoughts(encoder: Any) -> None:
    found = encoded(encoder("true"), row(*THREE))
    assert shown(found) == [
        ("U:a?]/A:<think>/1/</think>//A]/", "<think>/1/</think>//A]"),
        ("U:a?]/A:A]/U:b?]/A:<think>/2/</think>//B]/", "<think>/2/</think>//B]"),
        ("U:a?]/A:A]/U:b?]/A:B]/U:c?]/A:<think>/3/</think>//C]/", "<think>/3/</think>//C]"),
    ]
    assert isinstance(found, list)
    assert parts(found) == ["turn 1 of 3", "turn 2 of 3", "turn 3 of 3"]
    assert [len(sample.turns) for sample in found] == [2, 2, 2]
    whole = encoded(encoder("false"), row(*THREE))
    assert shown(whole) == [("U:a?]/A:A]/U:b?]/A:B]/U:c?]/A:<think>/3/</think>//C]/", "A]B]<think>/3/</think>//C]")]


def test_a_loop_of_tool_calls_is_one_sample_where_only_what_is_lost_is_expanded(encoder: Any) -> None:
    call, answer, last = "<think>/1/</think>//call]", "<think>/2/</think>//A]", "<think>/3/</think>//B]"
    found = encoded(encoder("auto"), row(*LOOP))
    assert [trained for _, trained in shown(found)] == [call + answer, last]
    assert isinstance(found, list)
    assert parts(found) == ["turn 2 of 3", "turn 3 of 3"]
    assert [trained for _, trained in shown(encoded(encoder("true"), row(*LOOP)))] == [call, answer, last]


@pytest.mark.parametrize(
    "turns",
    [
        (asked("a?"), said("A", "1")),
        (asked("a?"), said("A"), asked("b?"), said("B")),  # nobody thinks
        (asked("a?"), said("A"), asked("b?"), said("B", "2")),  # what is thought last is there
        (asked("a?"), said("A", "1", loss=False), asked("b?"), said("B", "2")),  # what is lost is not trained
        (asked("a?"), said("call", "1"), Turn("tool", "r"), said("A", "2")),
    ],
)
def test_rows_of_which_nothing_is_lost_are_what_they_were(encoder: Any, turns: tuple[Turn, ...]) -> None:
    (before,), (found,) = (encoder(expand).encode([row(*turns)])[0] for expand in ("false", "auto"))
    assert shown([found]) == shown([before])
    assert (found.part, found.borders) == (None, None)


def test_empty_thoughts_count_only_where_they_are_trained(encoder: Any) -> None:
    turns = row(*THREE[:2], asked("b?"), said("B"), asked("c?"), said("C"))
    assert [trained for _, trained in shown(encoded(encoder("auto"), turns))] == ["<think>/1/</think>//A]", "B]C]"]
    kept = encoded(encoder("auto", loss_scale="default+keep_empty_think"), turns)
    assert [trained for _, trained in shown(kept)] == ["<think>/1/</think>//A]", f"{EMPTY}B]", f"{EMPTY}C]"]


@pytest.mark.parametrize("scale", ["default", "last_round"])
def test_what_rows_say_of_their_turns_holds(encoder: Any, scale: str) -> None:
    """A turn that is not trained in the row has no sample; a weight is its own."""
    turns = (asked("a?"), said("A", "1", loss=False), asked("b?"), said("B", "2", loss_scale=0.0), *THREE[4:])
    turns += (asked("d?"), said("D", "4", loss=True), asked("e?"), said("E", "5", loss_scale=2.0))
    found = encoded(encoder("auto", loss_scale=scale), row(*turns))
    assert isinstance(found, list)
    expected = ["turn 3 of 5", "turn 4 of 5", "turn 5 of 5"]
    assert parts(found) == (expected if scale == "default" else expected[1:])
    assert found[-1].loss_scale is not None
    assert set(found[-1].loss_scale.tolist()) == {0, 2}


def test_what_follows_the_last_answer_is_left_out(encoder: Any) -> None:
    for expand in ("true", "auto"):
        found = encoded(encoder(expand), row(*THREE[:2], asked("b?")))
        assert shown(found) == [("U:a?]/A:<think>/1/</think>//A]/", "<think>/1/</think>//A]")]


def test_texts_and_sets_that_train_everything_stay_whole(encoder: Any) -> None:
    text = Sample((Turn("assistant", "some text"),), (), "t.txt", 0, is_text=True)
    assert shown(encoded(encoder("true"), text)) == [("some text", "some text")]
    (whole,) = shown(encoded(encoder("true"), row(*THREE, loss_scale="all")))
    assert whole[0] == whole[1]
    assert len(shown(encoded(encoder("true"), row(*THREE, loss_scale="last_round")))) == 1


def test_a_turn_that_is_too_long_is_left_out_alone(encoder: Any) -> None:
    found = encoded(encoder("true", max_length=80), row(*THREE))
    assert isinstance(found, EncodedRow)
    assert parts(found) == ["turn 1 of 3", "turn 2 of 3"]
    (lost,) = left_out_of(found)
    assert (lost.reason, lost.part) == ("over_max_length", RowPart(3, 3))
    assert json.loads(lost.to_json())["part"] == "turn 3 of 3"
    nothing = encoded(encoder("true", max_length=10), row(*THREE))
    assert isinstance(nothing, Dropped)
    assert (nothing.reason, nothing.row, nothing.part) == ("over_max_length", 7, None)
    assert "turn 1 of 3: " in nothing.detail
    with pytest.raises(RowError, match="turn 3 of 3"):
        encoded(encoder("true", max_length=80, truncation_strategy="raise"), row(*THREE))


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncated_turns_begin_and_end_where_they_did(encoder: Any, side: str) -> None:
    found = encoded(encoder("true", max_length=45, truncation_strategy=side), row(*THREE))
    assert isinstance(found, list)
    for sample in found:
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
    for number in range(3):
        Image.new("RGB", (8 + 8 * number, 8)).save(tmp_path / f"{number}.png")
        paths.append(MediaRef(str(tmp_path / f"{number}.png")))
    turns = (asked("<image>?"), said("A", "1"), asked("<image><image>?"), said("B", "2"))
    sample = replace(row(*turns), images=tuple(paths))
    (found,) = encoder_for(model, expand_turns="true").encode([sample])
    assert isinstance(found, list), found
    assert [[image.path for image in each.images] for each in found] == [
        [paths[0].path],
        [path.path for path in paths],
    ]


def shared(one: EncodedSample, other: EncodedSample) -> tuple[int, int]:
    """Tokens that two samples begin with in common, and those of the longest prefix that hashes tell of."""
    same = int(np.argmin(one.input_ids == other.input_ids[: one.length]))
    (hashes, lengths), (others, _) = (
        (found.hashes.tolist(), found.lengths.tolist()) for found in map(hashed, (one, other))
    )
    return same, max(length for length, digest in zip(lengths, hashes, strict=True) if digest in others)


def hashed(sample: EncodedSample) -> PrefixHashes:
    return prefix_hashes([sample], MediaTokens.of({}))[1]


@pytest.mark.parametrize("template", [HYBRID, OPENED])
def test_samples_of_a_row_share_all_up_to_the_turn_where_they_part(encoder: Any, template: str) -> None:
    found = encoded(encoder("true", template), row(*THREE))
    assert isinstance(found, list)
    for one, other in itertools.pairwise(found):
        same, told = shared(one, other)
        assert told == same == int(one.turns[0]) - len("<think>/") * (template == OPENED)


def test_a_line_that_merges_with_the_header_hides_no_prefix(data: Path, text_model: Any) -> None:
    encoder = cached_encoder(text_model("text-qwen3"), expand_turns="auto")
    found = encoded(encoder, row(asked("a?"), said("\n\nA", "1"), *THREE[2:4]))
    assert isinstance(found, list)
    same, told = shared(found[0], found[1])
    assert same - 1 <= told <= same < int(found[0].turns[0])


def test_only_templates_that_leave_thoughts_out_are_expanded_by_themselves(small_model: Any) -> None:
    """Told by what they render: in a key or in the text, whatever the template is called."""
    inline = KEEPING.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}")
    shows_none = KEEPING.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    kept = THINKING.replace("loop.index0 > ns.last and", "")
    for template, expected in ((HYBRID, "auto"), (OPENED, "auto"), (inline, "auto"), (KEEPING, "false")):
        files = ModelFiles.load(str(small_model(template, CONTROL)))
        assert expansion_of("auto", files) == expected
        assert expansion_of("true", files) == "true"
    for template in (shows_none, kept):
        assert expansion_of("auto", ModelFiles.load(str(small_model(template, CONTROL)))) == "false"


def test_a_remark_says_what_auto_comes_to(encoder: Any) -> None:
    assert "becomes several samples" in encoder("auto").warnings[-1]
    assert "changes nothing" in encoder("auto", KEEPING).warnings[-1]


def test_responses_share_the_prompt_and_have_weights(encoder: Any) -> None:
    answers = (Response((said("x"),)), Response((said("y", "why"),), 0.5))
    found = encoded(encoder("false", KEEPING), row(asked("q?"), said("H"), asked("r?"), responses=answers))
    assert shown(found) == [("U:q?]/A:H]/U:r?]/A:x]/", "H]x]"), ("U:q?]/A:H]/U:r?]/A:y]/", "y]")]
    assert isinstance(found, list)
    assert parts(found) == ["response 1 of 2", "response 2 of 2"]
    assert found[0].loss_scale is None
    assert found[1].loss_scale is not None
    assert found[1].loss_scale[found[1].labels != IGNORE_INDEX].tolist() == [0.5, 0.5]
    every = encoded(
        encoder("false", KEEPING, loss_scale="all"), row(asked("r?"), said("H"), asked("s?"), responses=answers)
    )
    assert [trained for _, trained in shown(every)] == ["U:r?]/A:H]/U:s?]/A:x]/", "y]"]
    (alone,) = shown(encoded(encoder("false", KEEPING), row(asked("r?"), responses=answers[:1])))
    assert alone == ("U:r?]/A:x]/", "x]")


def test_turns_and_responses_at_once(encoder: Any) -> None:
    answers = (Response((said("x", "3"),)), Response((said("y", "4"),), 2.0))
    found = encoded(encoder("auto"), row(*THREE[:5], responses=answers))
    assert isinstance(found, list)
    assert [trained for _, trained in shown(found)] == [
        f"<think>/{thought}/</think>//{text}]" for thought, text in ("1A", "2B", "3x", "4y")
    ]
    assert parts(found)[1:] == [
        "turn 2 of 3, response 1 of 2",
        "turn 3 of 3, response 1 of 2",
        "response 2 of 2",
    ]


TURNS = st.builds(
    said,
    st.text("xyz", min_size=1, max_size=3),
    st.none() | st.text("pqr", min_size=1, max_size=3),
    loss=st.sampled_from([None, None, False, True]),
)
STEPS = st.tuples(st.just(asked("u?")) | st.just(Turn("tool", "t")), TURNS)


def rendered(turns: Sequence[Turn]) -> str:
    """A conversation as ``HYBRID`` writes it, up to the end of its last turn."""
    last = max(number for number, turn in enumerate(turns) if turn.role == "user")
    text = ""
    for number, turn in enumerate(turns):
        thought = turn.extra.get("reasoning_content")
        thinks = turn.role == "assistant" and number > last and (number == len(turns) - 1 or thought)
        text += f"[{turn.role}/" + (f"<think>/{thought or ''}/</think>//" if thinks else "") + f"{turn.content}]/"
    return text.replace("[assistant/", "A:").replace("[user/", "U:").removesuffix("/")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=TURNS, more=st.lists(STEPS, max_size=4), expand=st.sampled_from(["true", "auto"]))
def test_every_turn_is_trained_once_as_if_it_came_last(
    small_model: Any, first: Turn, more: list[tuple[Turn, Turn]], expand: str
) -> None:
    """But for empty blocks of thoughts, which ``auto`` does not expand a row for."""
    turns = (asked("u?"), first, *(turn for step in more for turn in step))
    found = encoded(_encoder(small_model, expand), row(*turns))
    trained = [i for i, turn in enumerate(turns) if turn.role == "assistant" and turn.loss is not False]
    if not trained:
        assert isinstance(found, Dropped)
        return
    assert isinstance(found, list)
    ends = [(sample, int(end)) for sample in found for end in sample.turns[1::2]]
    for (sample, end), number in zip(ends, trained, strict=True):
        alone, here = rendered(turns[: number + 1]), text_of(sample.input_ids[:end])
        assert here.replace(EMPTY, "") == alone.replace(EMPTY, "")
        if expand == "true":
            assert (here, text_of(sample.input_ids)) == (alone, f"{alone}/")
        begin = int(sample.turns[list(sample.turns).index(end) - 1])
        thought, text = turns[number].extra.get("reasoning_content"), f"{turns[number].content}]"
        target = f"<think>/{thought}/</think>//{text}" if thought else text
        assert text_of(sample.labels[begin:end]) == target
    assert sum(text_of(sample.labels).count("]") for sample in found) == len(trained)


@cache
def _encoder(make: Any, expand: str) -> Encoder:
    return encoder_for(make(HYBRID, CONTROL), expand_turns=expand)


def _rows(data: Path) -> list[dict[str, Any]]:
    lines = (data / "tool_reasoning_50.jsonl").read_text().splitlines()
    return [found for found in map(json.loads, lines) if len(found["messages"]) > 5]


@pytest.mark.parametrize("expand", ["true", "auto"])
def test_turns_token_by_token(data: Path, text_model: Any, expand: str) -> None:
    """Each sample is the template's conversation up to its turn, and trains what follows the prompt."""
    directory = text_model("text-qwen3")
    tokenizer = tokenizer_of(directory)
    rows = _rows(data)
    encoder = cached_encoder(directory, expand_turns=expand)
    results = encoder.encode([to_sample(each, Source("rows.jsonl"), i) for i, each in enumerate(rows)])
    num_trained = 0
    for raw, found in zip(rows, results, strict=True):
        assert isinstance(found, EncodedRow)
        messages = [{"content": "", **{k: v for k, v in m.items() if v is not None}} for m in raw["messages"]]
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]

        def render(stop: int, messages: Any = messages, raw: Any = raw, **more: Any) -> str:
            return tokenizer.apply_chat_template(messages[:stop], tools=raw["tools"], tokenize=False, **more)

        trained = []
        for sample in found:
            assert sample.part is not None
            whole = render(places[sample.part.turn - 1] + 1)
            np.testing.assert_array_equal(sample.input_ids, tokenizer(whole, add_special_tokens=False)["input_ids"])
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
