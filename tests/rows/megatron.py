"""Megatron's indexed datasets, byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def megatron(path: Path, sequences: list[list[int]], borders: list[int], code: int = 8, kind: str = "<u2") -> Path:
    """Write an index and its tokens, and return the index's path.

    Args:
        borders: number of the first sequence of each document, and at the end the number of sequences.
        code: Megatron's number for ``kind``.
    """
    data = b"".join(np.array(sequence, kind).tobytes() for sequence in sequences)
    sizes = [len(sequence) for sequence in sequences]
    places = (np.cumsum([0, *sizes[:-1]]) * np.dtype(kind).itemsize).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(borders))
    index = head + np.array(sizes, "<i4").tobytes() + places.tobytes() + np.array(borders, "<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(data)
    return path.with_suffix(".idx")
