"""Lengths of samples from a file, and what plans and simulations of caches or files are called."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.config.yaml_values import load_json
from packtool.errors import ConfigError, DataError


def read_lengths(path: str) -> npt.NDArray[np.int64]:
    """Lengths, int64 (N,), from a .npy file, a JSON list of numbers, or a text file with a number a line.

    Raises:
        ConfigError: if the file is of another kind.
        DataError: if it does not hold whole numbers.
        StorageError: if it cannot be read.
    """
    try:
        with storage.open_read(path) as file:
            if path.endswith(".npy"):
                values = np.load(file, allow_pickle=False)
            elif path.endswith(".json"):
                values = np.array(load_json(file.read()))
            elif path.endswith(".txt"):
                values = np.array(file.read().split(), dtype=np.int64)
            else:
                raise ConfigError(f"--lengths {path}: neither .npy nor .json nor .txt")
        if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"an array of {values.dtype} with shape {values.shape}, not one of whole numbers")
    except ValueError as error:
        raise DataError(f"--lengths {path}: {error}", "One whole number a sample is expected.") from error
    return values.astype(np.int64)


def names_of(paths: Sequence[str]) -> str:
    """Caches or files by their own names, without the folders that they lie in: the title of a page."""
    return " + ".join(storage.name(path if storage.is_remote(path) else os.path.abspath(path)) for path in paths)
