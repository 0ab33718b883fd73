"""The CPU tier by itself: reference counts, all-or-nothing stores, claims, resets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiering.api.manager import PrepareStoreOutput
from tiering.api.request import ReqContext
from tiering.api.transfer import CPULoadStoreSpec
from tiering.errors import ConfigError, NotReadableError
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.keys import keys_of

CTX = ReqContext("r")


@pytest.fixture
def primary() -> CPUPrimaryTierOffloadingManager:
    return CPUPrimaryTierOffloadingManager(np.zeros((4, 16), np.uint8).data, enable_events=True)


def prepare(primary: CPUPrimaryTierOffloadingManager, keys: list[bytes], ctx: ReqContext = CTX) -> PrepareStoreOutput:
    output = primary.prepare_store(keys, ctx)
    assert output is not None
    return output


def store(primary: CPUPrimaryTierOffloadingManager, keys: list[bytes]) -> None:
    primary.complete_store(prepare(primary, keys).keys_to_store, CTX)


def rows_of(output: PrepareStoreOutput) -> list[int]:
    assert isinstance(output.store_spec, CPULoadStoreSpec)
    return list(output.store_spec.block_ids.tolist())


def test_a_block_is_pending_until_its_store_is_complete(primary: CPUPrimaryTierOffloadingManager) -> None:
    (key,) = keys_of(1)
    assert primary.lookup(key, CTX) is False
    prepare(primary, [key])
    assert primary.lookup(key, CTX) is None
    assert primary.match_prefix([key], CTX) == (1, True)
    primary.complete_store([key], CTX)
    assert primary.lookup(key, CTX) is True
    assert primary.match_prefix([key], CTX) == (1, False)


def test_a_failed_store_frees_its_rows_and_leaves_readable_blocks_alone(
    primary: CPUPrimaryTierOffloadingManager,
) -> None:
    held, new = keys_of(1), keys_of(2)
    store(primary, held)
    prepare(primary, held + new)
    primary.complete_store(held + new, CTX, success=False)
    assert primary.lookup(held[0], CTX) is True
    assert primary.lookup(new[0], CTX) is False
    assert primary.count_rows().free == 3


def test_a_store_without_room_changes_nothing(primary: CPUPrimaryTierOffloadingManager) -> None:
    keys = keys_of(*range(4))
    store(primary, keys)
    primary.prepare_load(keys[:2], CTX)
    assert primary.prepare_store(keys_of(*range(10, 13)), CTX) is None
    assert [primary.lookup(key, CTX) for key in keys] == [True] * 4
    assert primary.count_rows().evictable == 2


def test_a_key_of_the_same_call_is_never_evicted_to_make_room_for_it(primary: CPUPrimaryTierOffloadingManager) -> None:
    keys = keys_of(*range(4))
    store(primary, keys)
    oldest = keys[3]
    output = prepare(primary, [oldest, *keys_of(*range(10, 13))])
    assert output.keys_to_store == keys_of(*range(10, 13))
    assert oldest not in output.evicted_keys
    assert primary.lookup(oldest, CTX) is True
    assert primary.prepare_store([oldest, *keys_of(*range(20, 24))], CTX) is None


def test_rows_are_co_indexed_with_the_keys_to_store(primary: CPUPrimaryTierOffloadingManager) -> None:
    store(primary, keys_of(2))
    output = prepare(primary, keys_of(*range(4)))
    assert output.keys_to_store == [*keys_of(*range(2)), *keys_of(3)]
    primary.complete_store(output.keys_to_store, CTX)
    for key, row in zip(output.keys_to_store, rows_of(output), strict=True):
        spec = primary.prepare_load([key], CTX)
        assert isinstance(spec, CPULoadStoreSpec)
        assert spec.block_ids.tolist() == [row]


def test_nothing_new_to_store_is_an_empty_output(primary: CPUPrimaryTierOffloadingManager) -> None:
    store(primary, keys_of(*range(2)))
    output = prepare(primary, keys_of(*range(2)))
    assert output.keys_to_store == []
    assert rows_of(output) == []
    assert output.evicted_keys == []


def test_heads_of_a_prefix_outlive_its_tail(primary: CPUPrimaryTierOffloadingManager) -> None:
    keys = keys_of(*range(4))
    store(primary, keys)
    assert prepare(primary, keys_of(10)).evicted_keys == [keys[3]]
    primary.touch([keys[2], keys[0]], CTX)
    assert prepare(primary, keys_of(11)).evicted_keys == [keys[1]]
    assert prepare(primary, keys_of(12)).evicted_keys == [keys[0]]


def test_a_load_of_an_unreadable_key_raises_and_pins_nothing(primary: CPUPrimaryTierOffloadingManager) -> None:
    keys = keys_of(*range(2))
    store(primary, keys)
    with pytest.raises(NotReadableError) as raised:
        primary.prepare_load([*keys, *keys_of(9)], CTX)
    assert raised.value.keys == keys_of(9)
    assert primary.count_rows().evictable == 2


def test_a_block_is_protected_until_every_load_of_it_is_complete(primary: CPUPrimaryTierOffloadingManager) -> None:
    keys = keys_of(*range(4))
    store(primary, keys)
    for _ in range(2):
        primary.prepare_load(keys, CTX)
    primary.complete_load(keys[:2], CTX)
    assert primary.prepare_store(keys_of(10), CTX) is None
    primary.complete_load(keys, CTX)
    assert primary.count_rows().evictable == 2
    primary.complete_load(keys[2:], CTX)
    assert primary.count_rows().evictable == 4


def test_a_tier_reads_and_writes_rows_by_the_secondary_facing_names_without_changing_recency(
    primary: CPUPrimaryTierOffloadingManager,
) -> None:
    keys = keys_of(*range(4))
    output = primary.prepare_write(keys, CTX)
    assert output is not None
    assert primary.lookup(keys[0], CTX) is None
    primary.complete_write(keys, CTX)
    oldest = keys[3:]
    spec = primary.prepare_read(oldest, CTX)
    assert isinstance(spec, CPULoadStoreSpec)
    assert spec.block_ids.tolist() == rows_of(output)[3:]
    assert prepare(primary, keys_of(10)).evicted_keys == [keys[2]]
    primary.complete_read(oldest, CTX)
    assert prepare(primary, keys_of(11)).evicted_keys == oldest


def test_unknown_completions_are_ignored_and_counted(primary: CPUPrimaryTierOffloadingManager) -> None:
    keys = keys_of(*range(2))
    store(primary, keys)
    primary.complete_load(keys, CTX)
    primary.complete_store(keys_of(5), ReqContext("nobody"))
    assert primary.ignored_completions == 3
    assert primary.count_rows().evictable == 2


def test_a_reset_forgets_everything_and_quarantines_what_is_busy(primary: CPUPrimaryTierOffloadingManager) -> None:
    keys = keys_of(*range(2))
    store(primary, keys)
    read = primary.prepare_load(keys[:1], CTX).block_ids.tolist()
    written = rows_of(prepare(primary, keys_of(5)))
    primary.reset_cache()
    assert [primary.lookup(key, CTX) for key in [*keys, *keys_of(5)]] == [False] * 3
    assert primary.count_rows().free == 2
    # Rows that are still read and written are not free.
    busy = {*written, *read}
    assert not busy & set(rows_of(prepare(primary, keys_of(*range(10, 12)), ReqContext("other"))))
    primary.complete_load(keys[:1], CTX)
    primary.complete_store(keys_of(5), CTX)
    assert primary.lookup(keys_of(5)[0], CTX) is False
    assert primary.count_rows().free == 2


@pytest.mark.parametrize("late_first", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_loads_from_before_and_after_a_reset_end_with_their_own_rows(
    primary: CPUPrimaryTierOffloadingManager, late_first: bool, whole: bool
) -> None:
    keys, other = keys_of(0, 1), ReqContext("other")
    store(primary, keys)
    before = primary.prepare_load(keys, CTX).block_ids.tolist()
    primary.reset_cache()
    store(primary, keys)
    after = primary.prepare_load(keys, other).block_ids.tolist()
    assert not set(before) & set(after), "the rows of the first load are quarantined"
    for ctx in (other, CTX) if late_first else (CTX, other):
        for part in (keys,) if whole else (keys[1:], keys[:1]):
            primary.complete_load(part, ctx)
        quarantined = 0 if ctx is CTX or not late_first else 2
        assert primary.count_rows().quarantined == quarantined
    assert primary.count_rows().evictable == 2
    assert primary.ignored_completions == 0


@pytest.mark.parametrize("whole", [False, True])
def test_two_loads_of_one_request_end_in_the_order_of_their_beginning(
    primary: CPUPrimaryTierOffloadingManager, whole: bool
) -> None:
    keys = keys_of(0, 1)
    store(primary, keys)
    primary.prepare_load(keys, CTX)
    primary.reset_cache()
    store(primary, keys)
    primary.prepare_load(keys, CTX)
    for part in (keys,) if whole else (keys[1:], keys[:1]):
        primary.complete_load(part, CTX)
    counts = primary.count_rows()
    assert (counts.quarantined, counts.evictable) == (0, 0), "the first load has ended, the second one has not"
    primary.complete_load(keys, CTX)
    assert primary.count_rows().evictable == 2


@pytest.mark.parametrize("apart", [False, True])
def test_a_request_stores_a_block_again_only_when_its_store_from_before_a_reset_has_ended(
    primary: CPUPrimaryTierOffloadingManager, apart: bool
) -> None:
    """The new copy could end first, and with it the quarantine of a row that the old one still writes to."""
    keys, other = keys_of(0, 1), ReqContext("other")
    before = rows_of(prepare(primary, keys))
    primary.reset_cache()
    again = prepare(primary, keys_of(0, 1, 2))
    assert again.keys_to_store == keys_of(2)
    primary.complete_store(again.keys_to_store, CTX)
    assert not set(before) & set(rows_of(prepare(primary, keys_of(0), other)))
    for part in (keys[:1], keys[1:]) if apart else (keys,):
        primary.complete_store(part, CTX, success=False)
    assert primary.count_rows().quarantined == 0
    assert prepare(primary, keys).keys_to_store == keys_of(1)


def test_a_store_that_completes_after_a_reset_does_not_complete_somebody_elses(
    primary: CPUPrimaryTierOffloadingManager,
) -> None:
    key = keys_of(1)
    prepare(primary, key, ReqContext("old"))
    primary.reset_cache()
    prepare(primary, key, ReqContext("new"))
    primary.complete_store(key, ReqContext("old"))
    assert primary.lookup(key[0], CTX) is None
    primary.complete_store(key, ReqContext("new"))
    assert primary.lookup(key[0], CTX) is True


def test_events_say_stored_after_success_and_removed_on_eviction_and_reset(
    primary: CPUPrimaryTierOffloadingManager,
) -> None:
    keys = keys_of(*range(4))
    prepare(primary, keys)
    assert primary.take_events() == []
    primary.complete_store(keys, CTX)
    prepare(primary, keys_of(10))
    primary.reset_cache()
    events = [(event.keys, event.removed) for event in primary.take_events()]
    assert events == [(keys, False), ([keys[3]], True), (keys[:3], True)]


@pytest.mark.parametrize("buffer", [memoryview(bytes(16)), np.zeros((2, 2), np.int16).data])
def test_a_buffer_of_another_shape_is_refused(buffer: memoryview) -> None:
    with pytest.raises(ConfigError):
        CPUPrimaryTierOffloadingManager(buffer)


@pytest.mark.parametrize("buffer", [np.zeros((4, 16), np.uint8), bytearray(64), None, 4])
def test_a_buffer_of_another_type_is_refused_with_the_allowed_ones(buffer: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"is a {type(buffer).__name__}, but must be a SharedRegion or a writable mem"
    ):
        CPUPrimaryTierOffloadingManager(buffer)
