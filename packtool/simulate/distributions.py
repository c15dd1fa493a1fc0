"""Lengths like those of known data sets, drawn without the data.

Each distribution is a quantile function through the shares that Skrull (arXiv 2505.19609) prints of a data set: so
many per cent of the samples are shorter than 1K, 4K, ..., the longest has so many tokens. Between two points the
logarithm of the length rises linearly. Nothing is published below 1K tokens; there the function starts at ``SHORTEST``,
which is our assumption. K is 1,024 tokens.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from packtool.plan.shuffle import RandomStream

DistributionName = Literal["wikipedia", "lmsys", "chatqa2"]
SHORTEST = 64
_K = 1024

POINTS: dict[DistributionName, tuple[tuple[float, int], ...]] = {
    "wikipedia": (
        (0.0, SHORTEST),
        (0.8788, _K),
        (0.9934, 4 * _K),
        (0.9992, 8 * _K),
        (0.9999, 32 * _K),
        (1.0, 78 * _K),
    ),
    "lmsys": (
        (0.0, SHORTEST),
        (0.8712, _K),
        (0.9935, 4 * _K),
        (0.9987, 8 * _K),
        (0.9998, 32 * _K),
        (1.0, 1643 * _K),
    ),
    "chatqa2": (
        (0.0, SHORTEST),
        (0.2192, _K),
        (0.3148, 4 * _K),
        (0.4043, 8 * _K),
        (0.9986, 32 * _K),
        (1.0, 99 * _K),
    ),
}
"""(share of samples below, tokens) of Wikipedia, LMSYS-Chat-1M and ChatQA2-Long-SFT."""

assert set(POINTS) == set(get_args(DistributionName))


def quantiles(name: DistributionName, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Tokens that these shares of the samples are shorter than; int64, of the shape of ``shares`` in 0 to 1."""
    at, tokens = (np.array(column, dtype=np.float64) for column in zip(*POINTS[name], strict=True))
    found: npt.NDArray[Any] = np.exp(np.interp(shares, at, np.log(tokens)))
    return np.round(found).astype(np.int64)


def draw_lengths(name: DistributionName, num: int, *, seed: int) -> npt.NDArray[np.int64]:
    """int64 (num,): lengths, always the same for a seed; more of them begin with the same ones."""
    return quantiles(name, np.random.default_rng([seed, RandomStream.SIMULATED_LENGTHS]).random(num))
