from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.planning.prefix_trees import select_samples
from tests.planning.test_prefix_trees import Rows, planned_trees, some_rows


@settings(max_examples=50)
@given(some_rows.filter(len), st.data())
def test_selected_neighbors_share_the_prefix_of_the_removed_ones(rows: Rows, data: st.DataObject) -> None:
    trees, lengths = planned_trees(rows)
    stay = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    stay[data.draw(st.integers(0, len(rows) - 1))] = True
    result = select_samples(trees, stay)
    remaining_samples = [int(sample) for sample in trees.samples if stay[sample]]
    assert result.samples.tolist() == remaining_samples
    expected, last, min_shared = [], -1, 0
    group = np.repeat(np.arange(len(trees.offsets) - 1), np.diff(trees.offsets))
    for at, sample in enumerate(trees.samples):
        min_shared = min(min_shared, int(trees.shared_tokens[at]))
        if stay[sample]:
            expected.append(min_shared if last == group[at] else 0)
            last, min_shared = group[at], len(rows[sample])
    assert result.shared_tokens.tolist() == expected
    assert result.offsets[-1] == len(remaining_samples)
    assert (result.shared_tokens[result.offsets[:-1]] == 0).all()
    assert (result.sums_per_group(result.new_tokens(lengths)) > 0).all()
