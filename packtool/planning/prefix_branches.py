"""Branches of a pack with shared prefixes: the tokens that occur once, each after its parent branch."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.planning.pack_plan import IntArray
from packtool.planning.prefix_trees import NOTHING


@dataclass(frozen=True)
class Branch:
    """Tokens that occur once in a pack: a prefix of several samples, or the rest of one sample.

    Args:
        first_sample, stop_sample: the samples that have them, in pack order, ``stop_sample`` excluded.
        start, stop: positions of the tokens, the same in each of these samples.
        parent: index of the branch that they continue, earlier in the list; or ``NOTHING``.
    """

    first_sample: int
    stop_sample: int
    start: int
    stop: int
    parent: int

    @property
    def num_samples(self) -> int:
        return self.stop_sample - self.first_sample

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def find_branches(new_tokens: IntArray, shared: IntArray | None = None) -> list[Branch]:
    """List the branches of one pack: each prefix that several samples share, and the rest of each sample.

    For example, samples of 5 and 4 tokens that share 3: branches of 3 tokens (both samples), 2 (the first), 1 (the
    second). Branches come in the order of their tokens in the pack, each after its parent.

    Args:
        new_tokens: tokens that each sample adds to the pack, 1 or more, (S,); here 5, 1.
        shared: tokens that each sample shares with the sample before it, (S,); here 0, 3. None if nothing is shared.
    """
    shared_tokens = [0] * len(new_tokens) if shared is None else shared.tolist()
    shared_tokens.append(0)  # nothing is shared beyond the end of the pack
    branches: list[Branch] = []
    path: list[int] = []  # indices of the branches that make up the current sample, from its beginning
    for sample, num_new in enumerate(new_tokens.tolist()):
        num_shared = shared_tokens[sample]
        # Branches end wherever a later sample leaves them, so the shared prefix consists of complete branches.
        while path and branches[path[-1]].stop > num_shared:
            path.pop()
        start = num_shared
        for stop, stop_sample in _new_branch_stops(sample, num_shared + num_new, shared_tokens):
            parent = path[-1] if path else NOTHING
            path.append(len(branches))
            branches.append(Branch(sample, stop_sample, start, stop, parent))
            start = stop
    return branches


def _new_branch_stops(sample: int, num_tokens: int, shared_tokens: list[int]) -> list[tuple[int, int]]:
    """Find the branches of a sample of ``num_tokens`` that the sample before it lacks, the first tokens first.

    Returns the token position at which each ends, and the first following sample that lacks it.
    """
    stops: list[tuple[int, int]] = []
    stop = num_tokens
    for following in range(sample + 1, len(shared_tokens)):
        if shared_tokens[following] < stop:
            stops.append((stop, following))
            stop = shared_tokens[following]
        if stop <= shared_tokens[sample]:
            break  # the sample before it has all tokens up to here
    return stops[::-1]
