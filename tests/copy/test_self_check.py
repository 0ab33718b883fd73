"""The check of one block out and back at registration, on both kinds of handlers."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.copy import kv
from tests.copy.fake_cuda import FakeCuda
from tiering.api.engine import CanonicalKVCaches
from tiering.copy.contract import OffloadingHandler
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.copy.pinning import PinnedRows
from tiering.copy.self_check import check_round_trip
from tiering.errors import ConfigError


def handlers(
    cache: CanonicalKVCaches, rows: NDArray[np.uint8], layout: RowLayout, cuda: bool
) -> tuple[OffloadingHandler, OffloadingHandler]:
    if not cuda:
        store, load = (HostCopyHandler(cache, rows, layout, direction, 1) for direction in Direction)
        return store, load
    api = FakeCuda()
    pinned = PinnedRows(rows, api)
    first, second = (CudaCopyHandler(cache, pinned, layout, direction, api.kernel) for direction in Direction)
    return first, second


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 12])
def test_blocks_and_rows_are_as_before(cuda: bool, rank: int, copies: int, num_rows: int) -> None:
    cache = kv.two_groups()
    before = [tensor.tensor.clone() for tensor in cache.tensors]
    layout = RowLayout.of(cache, 2, rank, 2, copies)
    rows = kv.make_rows(layout, num_rows)
    rows_before = rows.copy()
    store, load = handlers(cache, rows, layout, cuda)
    check_round_trip(store, load, cache, rows, layout)
    assert (rows == rows_before).all()
    assert all(bool((a.tensor == b).all()) for a, b in zip(cache.tensors, before, strict=True))
    assert store.get_finished() == load.get_finished() == []
    store.shutdown()
    load.shutdown()


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize(("broken", "way"), [(Direction.STORE, "to"), (Direction.LOAD, "from")])
def test_a_byte_that_changes_on_its_way_is_an_error_at_the_start(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, broken: Direction, way: str
) -> None:
    cache = kv.two_groups()
    before = [tensor.tensor.clone() for tensor in cache.tensors]
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    store, load = handlers(cache, rows, layout, cuda)
    handler = store if broken is Direction.STORE else load
    wait = handler.wait

    def wait_and_change(job_ids: list[int]) -> None:
        wait(job_ids)
        if broken is Direction.STORE:
            rows[-1, 0] ^= 1
        else:
            cache.tensors[0].tensor[-1, 0] ^= 1

    monkeypatch.setattr(handler, "wait", wait_and_change)
    with pytest.raises(ConfigError, match=f"rank 0: a block of KV-cache group 0 was changed on its way {way}"):
        check_round_trip(store, load, cache, rows, layout)
    assert all(bool((a.tensor == b).all()) for a, b in zip(cache.tensors, before, strict=True))
    store.shutdown()
    load.shutdown()


def test_a_copy_that_fails_is_an_error_at_the_start() -> None:
    cache = kv.canonical()
    layout = RowLayout.of(cache)
    rows = kv.make_rows(layout)
    store, load = handlers(cache, rows, layout, cuda=False)
    load.shutdown()
    with pytest.raises(ConfigError, match="a load of one block failed"):
        check_round_trip(store, load, cache, rows, layout)
    store.shutdown()
