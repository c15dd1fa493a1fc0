from __future__ import annotations

import json
from array import array
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from packtool.encode.tokenize import _SAFE_RANGES, WordTokenizer, _safe_chars

QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")
SOME_TEXT = [
    "the quick brown fox, isn't it? 1234 + 5",
    "你好，世界。 привет ΑΒΓ",
    "def f(x):\n    return x  # ok\n\n",
] * 20


@cache
def trained_tokenizer(pattern: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    cutter = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cutter, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SOME_TEXT, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.encode_special_tokens = True
    return tokenizer


def expected(tokenizer: Tokenizer, text: str) -> array[int]:
    return array("i", tokenizer.encode(text, add_special_tokens=False).ids)


@cache
def words_of(pattern: str) -> WordTokenizer:
    words = WordTokenizer.of(trained_tokenizer(pattern))
    assert words is not None
    return words


WORDS = "'S 'll don't <think> </think> <|im_end|> 12345 a Zz ... é ß 你好 。 か 한 ２ 🙂 № ſ K 𝒳 e\u0301"
BLANKS = (" ", "  ", "\n", "\r\n", "\t", "!\n", "\u00a0", "\u200d", "\x1c", "\u2028")
PIECES = st.sampled_from((*WORDS.split(), *BLANKS))
SAFE = _safe_chars()
EDGES = "\u4e00\u9fa5\uac00\ud7a3"


@settings(max_examples=300)
@given(st.sampled_from([QWEN, LLAMA3]), st.lists(PIECES | st.text(max_size=6), max_size=12))
def test_any_text_has_the_tokens_of_the_library_or_is_delegated(pattern: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    token_ids = words_of(pattern).encode(text)
    assert token_ids is None or token_ids == expected(trained_tokenizer(pattern), text)


@pytest.mark.smoke
@settings(max_examples=200)
@given(st.text(alphabet=SAFE, max_size=30))
def test_safe_texts_are_tokenized_correctly(text: str) -> None:
    token_ids = words_of(QWEN).encode(text)
    assert token_ids == expected(trained_tokenizer(QWEN), text)


def test_both_regex_engines_classify_safe_characters_equally() -> None:
    """Behind a letter, a number and a blank each class of character makes other words."""
    tokenizer, words = trained_tokenizer(QWEN), words_of(QWEN)
    # Of the large blocks, whose characters are all alike, some.
    chars_to_test = [
        char for i, char in enumerate(SAFE) if not 0x3400 < ord(char) < 0xD7A3 or i % 41 == 0 or char in EDGES
    ]
    for start in range(0, len(chars_to_test), 200):
        chars = chars_to_test[start : start + 200]
        text = "".join(f"a{char}a1{char}1 {char} {char}b{char * 2}'{char}" for char in chars)
        assert words.encode(text) == expected(tokenizer, text), (hex(ord(chars[0])), hex(ord(chars[-1])))
    assert len(_SAFE_RANGES) > 10


def test_other_tokenizers_are_delegated_to_the_library() -> None:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert WordTokenizer.of(plain) is None
    assert WordTokenizer.of(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
    for pattern in (r"\p{Lu}+|.", r"(?<=a)b|.", r"[^\S\r]+|."):
        assert WordTokenizer.of(trained_tokenizer(pattern)) is None
    greedy = Tokenizer.from_str(trained_tokenizer(QWEN).to_str())
    greedy.add_tokens([AddedToken("<wide>", lstrip=True, normalized=False)])
    assert WordTokenizer.of(greedy) is None


@pytest.mark.parametrize(
    "name", ["text_gsm8k_test", "tool_glaive_en", "tool_reasoning_50", "mm_xtuner_coco_zh", "mm_mathvision_a"]
)
def test_texts_of_rows_have_the_tokens_of_the_library(data: Path, name: str) -> None:
    tokenizer = Tokenizer.from_file(str(data / "tokenizers" / "qwen3-vl" / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    words = WordTokenizer.of(tokenizer)
    assert words is not None
    lines = (data / f"{name}.jsonl").read_text().splitlines()[:300]
    texts = [message["content"] or "" for line in lines for message in json.loads(line)["messages"]]
    token_ids = [words.encode(text) for text in texts]
    assert sum(ids is None for ids in token_ids) < len(texts) / 50
    for text, ids in zip(texts, token_ids, strict=True):
        assert ids is None or ids == expected(tokenizer, text)
