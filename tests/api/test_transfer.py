"""The two sides of a transfer refuse lengths that disagree."""

from __future__ import annotations

import numpy as np
import pytest

from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.errors import ConfigError


@pytest.mark.parametrize(
    ("sizes", "indices", "reason"),
    [
        ([1], [0], "add up to 1, block_ids has 2"),
        ([3], [0], "add up to 3, block_ids has 2"),
        ([1, 1], [0], "has 2 groups, block_indices 1"),
        ([2], [0, 0], "has 1 groups, block_indices 2"),
        ([-1, 3], [0, 0], "has a negative number"),
    ],
)
def test_lengths_that_disagree_are_refused(sizes: list[int], indices: list[int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        GPULoadStoreSpec([7, 8], sizes, indices)


def test_ids_are_an_array_of_integers_by_group() -> None:
    spec = GPULoadStoreSpec([7, 8, 9], [2, 0, 1], [4, 0, 0])
    assert spec.block_ids.dtype == np.int64
    assert (spec.group_sizes, spec.block_indices, spec.medium()) == ((2, 0, 1), (4, 0, 0), "GPU")
    assert CPULoadStoreSpec([]).medium() == "CPU"
