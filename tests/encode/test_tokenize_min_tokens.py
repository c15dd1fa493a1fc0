"""Rows that are certainly too long are dropped for the usual reason before they are tokenized."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from packtool.encode import encoder as encoder_module
from packtool.encode.tokenize import Chunk, ChunkTokenizer, ControlVocabulary, WordTokenizer
from packtool.errors import RowError
from packtool.rows.sample import Dropped
from tests.encode.conftest import encoder_for
from tests.encode.test_encoder import CHATML, CONTROL, encode

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(normalizer: Any = None, split_words: bool = True) -> Tokenizer:
    """Bytes, and a few merges of spaces and letters."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("a", "b"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ab", "ab")]
    vocabulary |= {"".join(pair): len(vocabulary) + i for i, pair in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only]) if split_words else bytes_only
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    normalizer = normalizers.NFC() if kind.endswith("NFC") else None
    return byte_level(normalizer, split_words=kind.startswith("words"))


def min_tokens(tokenizer: Tokenizer, text: str, enough: int) -> int:
    return ChunkTokenizer(tokenizer, ControlVocabulary(tokenizer)).min_tokens([Chunk("", "", text)], enough)


TEXTS = st.text(st.sampled_from("ab  \n1.,é\u0301\u1f82\u0313\u0342\u0345你\U0001f600\u1100\u1161\u11a8"), max_size=60)


@pytest.mark.parametrize("kind", ["words", "words, NFC", "bytes", "bytes, NFC"])
@settings(max_examples=150)
@given(text=TEXTS | st.text(max_size=40), times=st.integers(1, 5), enough=st.integers(1, 100))
def test_min_token_estimate_is_a_lower_bound(kind: str, text: str, times: int, enough: int) -> None:
    tokenizer = tokenizer_of(kind)
    lower_bound = min_tokens(tokenizer, text * times, enough)
    num_tokens = len(tokenizer.encode(text * times, add_special_tokens=False).ids)
    assert lower_bound <= num_tokens
    assert lower_bound > 0 or not text


def test_lossy_tokenizers_have_no_lower_bound() -> None:
    for lossy in (
        byte_level(normalizers.Replace("a", "")),
        byte_level(normalizers.Strip()),
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        Tokenizer(models.BPE({"a": 0, "u": 1}, [], unk_token="u", fuse_unk=True)),
    ):
        assert min_tokens(lossy, "a b c" * 1000, 10) == 0


@pytest.mark.parametrize("strategy", ["delete", "raise", "left", "right"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=4))
def test_early_drop_gives_the_same_result(strategy: str, sizes: list[int], small_model: Any) -> None:
    texts = ["x" * size for size in sizes]
    if len(texts) % 2:
        texts.append("a")
    outcomes = []
    for limit in (10, 64):
        encoder = encoder_for(small_model(CHATML, CONTROL), max_length=limit, truncation_strategy=strategy)
        for look_ahead in (True, False):
            if not look_ahead:
                encoder._drop_too_long = lambda item: None  # type: ignore[method-assign]
            try:
                result = encode(encoder, *texts)
            except RowError as error:
                outcomes.append(error.reason)
                continue
            outcome = (
                result.reason if isinstance(result, Dropped) else (result.input_ids.tolist(), result.num_truncated)
            )
            outcomes.append(str(outcome))
    assert outcomes[::2] == outcomes[1::2]


def test_overlong_text_is_not_tokenized(small_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder: Path = small_model(CHATML, CONTROL)
    encoder = encoder_for(folder, max_length=100)
    monkeypatch.setattr(
        encoder._chunk_tokenizer, "encode", lambda chunks: [[1] for chunk in chunks if len(chunk.text) < 1000]
    )
    dropped = encode(encoder, "x" * 10_000, "a")
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "over_max_length"
    assert dropped.detail.startswith("at least ")
    assert int(dropped.detail.split()[2]) > 100


@settings(max_examples=60)
@given(text=TEXTS, times=st.integers(1, 9), num=st.integers(1, 50))
def test_ends_of_a_text_equal_those_of_all_tokens(text: str, times: int, num: int) -> None:
    words = WordTokenizer.of(tokenizer_of("words"))
    assert words is not None
    all_ids, end_ids = words.encode(text * times), words.ends(text * times, num)
    if all_ids is None:
        assert end_ids is None
        return
    assert end_ids is not None
    ids, between = end_ids
    assert len(ids) + between == len(all_ids)
    assert ids[:num] == all_ids[:num]
    assert ids[-num:] == all_ids[-num:]


@pytest.mark.parametrize("strategy", ["left", "right"])
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=4))
def test_truncated_tokens_are_not_kept_in_memory(
    strategy: str, sizes: list[int], small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_model(CHATML, CONTROL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), bytes_only])
    tokenizer.save(str(folder / "tokenizer.json"))
    encoder = encoder_for(folder, max_length=10, truncation_strategy=strategy)
    texts = [f"a{size} " * size for size in sizes]
    outcomes, longest = [], []
    join_tokens = encoder_module.join_tokens
    with monkeypatch.context() as patch:
        patch.setattr(
            encoder_module,
            "join_tokens",
            lambda *arguments: longest.append(max(map(len, arguments[1]))) or join_tokens(*arguments),
        )
        for _ in range(2):
            result = encode(encoder, *texts)
            outcome = (result.reason, result.detail) if isinstance(result, Dropped) else result
            outcomes.append(
                (outcome.input_ids.tolist(), outcome.labels.tolist(), outcome.turns.tolist(), outcome.num_truncated)
                if not isinstance(outcome, tuple)
                else outcome
            )
            patch.setattr(encoder, "_tokenize_ends", lambda prepared: {})
    assert outcomes[0] == outcomes[1]
    if max(sizes) > 100:
        assert longest[0] < 200 < longest[1]
