"""What several processes do with a sequence: as asked, or what sends least, with a reason."""

from __future__ import annotations

import pytest

from packtool.attention.parallel.axes import Axes, Heads, choose_axes, refuse_unshareable_sequences
from packtool.config.packing import ParallelOptions
from packtool.errors import ConfigError, UnsupportedModelError

QWEN3_8B = Heads(32, 8)


def chosen_axes(heads: Heads = QWEN3_8B, *, length: int = 30_000, node: int = 8, **options: object) -> Axes:
    return choose_axes(ParallelOptions(**options), heads, typical_length=length, ranks_per_node=node)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 1)),
        ({"sequence_parallel_size": 4, "sequence_parallel_type": "ulysses"}, (1, 4)),
        ({"sequence_parallel_size": 4, "sequence_parallel_type": "ring"}, (4, 1)),
        ({"sequence_parallel_size": 4, "sequence_parallel_type": "allgather"}, (4, 1)),
        ({"sequence_parallel_size": 8, "ulysses_size": 2}, (4, 2)),
        ({"sequence_parallel_size": 8, "ring_size": 2}, (2, 4)),
        ({"ulysses_size": 2, "ring_size": 2}, (2, 2)),
        ({"ulysses_size": 2}, (1, 2)),
        ({"ring_size": 2}, (2, 1)),
    ],
)
def test_requested_axes_are_used(options: dict[str, object], expected: tuple[int, int]) -> None:
    axes = chosen_axes(**options)
    assert (axes.ring_size, axes.ulysses_size) == expected
    if options:
        assert "as asked" in axes.reason


@pytest.mark.smoke
def test_auto_minimizes_communication() -> None:
    # (P - 1) / P * (2 Hq + 2 Hkv) against (P - 1) * 2 Hkv: 80 / 8 against 16 for P = 8; 80 / 2 against 16 for P = 2.
    assert QWEN3_8B.volume(1, 8, "ring", backward=False) == pytest.approx(7 / 8 * 80 / 8)
    assert QWEN3_8B.volume(8, 1, "ring", backward=False) == pytest.approx(7 * 16 / 8)
    # Backward Ulysses sends as much again; a ring K and V, and their gradients of 32 bits on one hop more.
    assert QWEN3_8B.volume(1, 8, "ring") == pytest.approx(2 * 7 / 8 * 80 / 8)
    assert QWEN3_8B.volume(8, 1, "ring") == pytest.approx((7 + 7 + 2 * 8) * 16 / 8)
    assert QWEN3_8B.volume(8, 1, "allgather") == pytest.approx((7 + 7 + 2 * 7) * 16 / 8)
    assert chosen_axes(sequence_parallel_size=8).ulysses_size == 8
    assert chosen_axes(sequence_parallel_size=2).ulysses_size == 2
    # One head of K and V for many of Q: they are small, and passing them around is cheaper than exchanging Q.
    assert chosen_axes(Heads(32, 1), sequence_parallel_size=4).ring_size == 4
    assert chosen_axes(Heads(32, 32), sequence_parallel_size=4).ulysses_size == 4


def test_auto_reports_communication_volumes() -> None:
    reason = chosen_axes(sequence_parallel_size=8).reason
    assert "32 heads of Q and 8 of K and V" in reason
    assert "17.5 by ulysses over 8" in reason


def test_short_samples_are_not_split_into_chunks() -> None:
    mqa_heads = Heads(32, 1)
    assert chosen_axes(mqa_heads, sequence_parallel_size=2).ring_size == 2
    assert chosen_axes(mqa_heads, sequence_parallel_size=2, length=300).ulysses_size == 2
    assert "chunks of less than 256" in chosen_axes(mqa_heads, sequence_parallel_size=2, length=300).reason


def test_long_chunks_use_rings_and_short_ones_gathers() -> None:
    mqa_heads = Heads(32, 1)
    assert chosen_axes(mqa_heads, sequence_parallel_size=2, length=30_000).kv_exchange == "ring"
    assert chosen_axes(mqa_heads, sequence_parallel_size=2, length=2000).kv_exchange == "allgather"
    assert (
        chosen_axes(mqa_heads, sequence_parallel_size=2, length=2000, sequence_parallel_type="ring").kv_exchange
        == "ring"
    )
    assert chosen_axes(ring_size=2, length=30_000, sequence_parallel_type="allgather").kv_exchange == "allgather"


def test_ulysses_stays_within_a_node() -> None:
    axes = chosen_axes(Heads(32, 32), sequence_parallel_size=16, node=8)
    assert (axes.ring_size, axes.ulysses_size) == (2, 8)
    # Of six processes a machine, four would be on two machines every now and then.
    axes = chosen_axes(Heads(32, 32), sequence_parallel_size=4, node=6)
    assert (axes.ring_size, axes.ulysses_size) == (2, 2)


@pytest.mark.parametrize(
    ("heads", "size", "fits"),
    [
        *((Heads(*heads), size, True) for heads, size in (((8, 2), 4), ((8, 1), 8), ((24, 6), 4), ((6, 3), 2))),
        *((Heads(*heads), size, False) for heads, size in (((6, 2), 4), ((8, 3), 2))),
    ],
)
def test_valid_head_counts_are_accepted(heads: Heads, size: int, fits: bool) -> None:
    assert heads.can_divide_among(size) is fits


def test_invalid_head_counts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="14 heads of Q and 2 of K and V: ulysses over 4 cannot"):
        chosen_axes(Heads(14, 2), sequence_parallel_size=4, sequence_parallel_type="ulysses")
    # auto finds another way.
    axes = chosen_axes(Heads(14, 2), sequence_parallel_size=4)
    assert axes.ring_size * axes.ulysses_size == 4
    assert axes.ulysses_size in (1, 2)


def test_windows_are_not_split() -> None:
    sliding = Heads(8, 8, has_windows=True)
    assert chosen_axes(sliding, sequence_parallel_size=2).ulysses_size == 2
    with pytest.raises(ConfigError, match="only --sequence-parallel-type ulysses"):
        chosen_axes(sliding, sequence_parallel_size=2, sequence_parallel_type="ring")
    with pytest.raises(ConfigError, match="must not be cut"):
        chosen_axes(Heads(7, 7, has_windows=True), sequence_parallel_size=2)


def test_heads_of_a_config() -> None:
    text = {"num_attention_heads": 16, "num_key_value_heads": 4}
    assert Heads.of_config({"text_config": text}) == Heads(16, 4)
    assert Heads.of_config({"num_attention_heads": 16}) == Heads(16, 16)
    assert Heads.of_config({"thinker_config": {"text_config": text}}) == Heads(16, 4)
    window = {"sliding_window": 4096}
    assert not Heads.of_config(text | window | {"use_sliding_window": False}).has_windows
    assert Heads.of_config(text | window | {"use_sliding_window": True}).has_windows
    assert Heads.of_config(text | window | {"layer_types": ["full_attention", "sliding_attention"]}).has_windows
    assert not Heads.of_config(text | window | {"layer_types": ["full_attention"]}).has_windows
    # Mistral's say no more.
    assert Heads.of_config(text | window).has_windows
    assert not Heads.of_config(text | {"sliding_window": None}).has_windows


def test_unsupported_models_are_refused() -> None:
    config = {"text_config": {"layer_types": ["linear_attention", "full_attention"]}}
    with pytest.raises(UnsupportedModelError, match="for it has recurrent layers of a kind"):
        refuse_unshareable_sequences(config)


def test_heads_of_gated_delta_nets() -> None:
    text = {"model_type": "qwen3_next", "layer_types": ["linear_attention"]}
    text |= {"linear_num_value_heads": 32, "linear_num_key_heads": 16}
    for config in (text, {"model_type": "qwen3_5", "text_config": text | {"model_type": "qwen3_5_text"}}):
        for size in (1, 2, 8, 32):
            refuse_unshareable_sequences(config, size)
        with pytest.raises(ConfigError, match=r"6: the gated delta nets .* 32 heads of values and 16 of keys"):
            refuse_unshareable_sequences(config, 6)


def test_attention_dropout_is_refused_in_training() -> None:
    refuse_unshareable_sequences({"attention_dropout": 0.1})
    refuse_unshareable_sequences({"attention_dropout": 0.0}, trained=True)
    with pytest.raises(UnsupportedModelError, match=r"drops 0\.1 of its attention weights"):
        refuse_unshareable_sequences({"text_config": {"attention_dropout": 0.1}}, trained=True)
