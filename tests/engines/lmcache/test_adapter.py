"""The L2 adapter for LMCache, over a stand-in for LMCache."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.lmcache.double import (
    METHODS,
    VERSION,
    Controller,
    GDSMemoryObject,
    MemoryLayoutDesc,
    ObjectKey,
    TensorMemoryObj,
    installed,
)
from tests.thread_limit import ThreadLimit
from tiering.api.manager import OffloadingEvent
from tiering.engines.lmcache.objects import Layout, Ledger, block_sizes, layout_of, parts_of
from tiering.errors import ConfigError, TierUnavailableError
from tiering.testing.clock import until

MEMORY: dict[str, Any] = {"type": "memory", "capacity": "64MiB"}
PLUGIN = {"type": "plugin", "module_path": "tiering.engines.lmcache", "class_name": "KVTieringAdapter"}
SHAPE = torch.Size((2, 16, 512))
DESC = {0: MemoryLayoutDesc([SHAPE], [torch.bfloat16])}


def keys(number: int, first: int = 0, **changed: Any) -> list[ObjectKey]:
    names = [hashlib.sha256(str(index).encode()).digest() for index in range(first, first + number)]
    return [ObjectKey(**{"chunk_hash": name, "model_name": "org/model", "kv_rank": 1, **changed}) for name in names]


def objects(
    keys: Sequence[ObjectKey], shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.bfloat16
) -> dict[ObjectKey, TensorMemoryObj]:
    """Return an object per key whose bytes are those of the key."""
    found = {}
    for key in keys:
        generator = torch.Generator().manual_seed(int.from_bytes(key.chunk_hash[:7], "big"))
        found[key] = TensorMemoryObj(torch.randn(tuple(shape), generator=generator).to(dtype))
    return found


def empty(keys: Sequence[ObjectKey], shape: Sequence[int] = SHAPE, dtype: Any = torch.bfloat16) -> dict[ObjectKey, Any]:
    return {key: TensorMemoryObj(torch.zeros(tuple(shape), dtype=dtype)) for key in keys}


def same(left: Mapping[ObjectKey, Any], right: Mapping[ObjectKey, Any]) -> bool:
    return all(torch.equal(left[key].raw_data, right[key].raw_data) for key in left)


def params(**changed: Any) -> dict[str, Any]:
    stack = {"primary": {"capacity": "2MiB"}, "secondary": [MEMORY], "revision": "r1", "shutdown_deadline": "5s"}
    return {"block_bytes": "16KiB", **stack, **changed}


@contextmanager
def running(*, version: str = VERSION, **changed: Any) -> Iterator[Controller]:
    """Attach the adapter as LMCache does, and close it at the end."""
    with installed(version) as create:
        adapter = create({**PLUGIN, "adapter_params": params(**changed)})
        try:
            yield Controller(adapter)
        finally:
            adapter.close()
            adapter.close()


def is_held(controller: Controller, key: ObjectKey) -> bool:
    return controller.look_up([key], DESC) == [True]


def fill(controller: Controller, names: Sequence[ObjectKey]) -> None:
    """Store objects one after another, each once there is room for it."""
    for key in names:
        assert until(partial(controller.store, objects([key])))


def test_objects_come_back_with_the_same_bytes() -> None:
    with running() as controller:
        names = keys(8)
        assert controller.store(objects(names))
        assert controller.look_up([*names, *keys(3, first=90)], DESC) == [True] * 8 + [False] * 3
        back = empty([*names, *keys(1, first=90)])
        assert controller.load(back) == [True] * 8 + [False]
        assert not back.pop(keys(1, first=90)[0]).raw_data.any()
        assert same(back, objects(names))
        assert controller.adapter.report_status() == {
            "is_healthy": True,
            "type": "KVTieringAdapter",
            "objects": 8,
            "late_calls": 0,
            "stored": 8,
            "not_stored": 0,
            "loaded": 8,
            "missed": 1,
        }


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (8192,), (8193,), (2, 40, 512), (1 << 18,)])
def test_an_object_of_any_size_is_cut_into_blocks(shape: tuple[int, ...]) -> None:
    with running() as controller:
        names = keys(2)
        stored, back = objects(names, shape), empty(names, shape)
        assert controller.store(stored)
        assert controller.look_up(names, {0: MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])}) == [True, True]
        assert controller.load(back) == [True, True]
        assert same(back, stored)


def test_objects_leave_the_memory_and_come_back_in_parts_of_it() -> None:
    with running() as controller:
        names = keys(200)  # 6.25 MiB, behind 2 MiB of memory
        fill(controller, names)
        assert until(lambda: all(controller.look_up(names, DESC)))
        back = empty(names)
        assert all(controller.load(back))
        assert same(back, objects(names))


def test_an_object_that_is_larger_than_the_memory_passes_through_it_in_parts() -> None:
    with running() as controller:
        names, shape = keys(1, first=5), (2, 1 << 20)  # 4 MiB, behind 2 MiB of memory
        assert until(lambda: controller.store(objects(names, shape)))
        assert until(lambda: controller.look_up(names, {0: MemoryLayoutDesc([torch.Size(shape)], [torch.bfloat16])})[0])
        back = empty(names, shape)
        assert controller.load(back) == [True]
        assert same(back, objects(names, shape))


def test_an_object_has_the_same_blocks_in_all_versions() -> None:
    """A change would make a miss of each object that an earlier version has stored."""
    layout = layout_of([torch.Size((4, 8, 16, 128))], [torch.bfloat16])
    assert layout == Layout(131072, '[[[4, 8, 16, 128], "torch.bfloat16"]]')
    key = ObjectKey(chunk_hash=b"x" * 32, model_name="org/model", kv_rank=1)
    parts = parts_of(key, Layout(5 << 20, layout.text), block_sizes(2 << 20))
    assert [(part.start, part.nbytes, part.key.hex()) for part in parts] == [
        (0, 2 << 20, "20835cba01dfe0005830b814ce4e4abb845b7d06bd404592e7314b7b553c491200000000"),
        (2 << 20, 2 << 20, "6dffb8545020ca267aca29b57b3706ba2b61d46c10e451b49e89b887c236472600000000"),
        (4 << 20, 1 << 20, "90222e1f6fe8718c13e45a91e01f6f489a23bb9730635c51634fd3928b5dd50600000001"),
    ]


OTHER_KEYS: dict[str, dict[str, Any]] = {
    "model": {"model_name": "org/other"},
    "rank": {"kv_rank": 2},
    "group": {"object_group_id": 1},
    "salt": {"cache_salt": "tenant"},
    "chunk": {"chunk_hash": b"other"},
}


@pytest.mark.parametrize("other", OTHER_KEYS)
def test_an_object_of_another_key_is_a_miss(other: str) -> None:
    with running() as controller:
        controller.store(objects(keys(1)))
        changed = [dataclasses.replace(key, **OTHER_KEYS[other]) for key in keys(1)]
        assert controller.look_up(changed, {**DESC, 1: DESC[0]}) == [False]
        assert controller.load(empty(changed)) == [False]


@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPE, torch.float16), (SHAPE[::-1], torch.bfloat16), ((2, 16, 256), torch.bfloat16)]
)
def test_an_object_of_another_layout_is_a_miss_and_both_are_kept(shape: Any, dtype: torch.dtype) -> None:
    with running() as controller:
        names = keys(1)
        controller.store(objects(names))
        assert controller.look_up(names, {0: MemoryLayoutDesc([torch.Size(shape)], [dtype])}) == [False]
        back = empty(names, shape, dtype)
        assert controller.load(back) == [False]
        assert not back[names[0]].raw_data.any()
        assert controller.store(objects(names, shape, dtype))
        for form in ((shape, dtype), (SHAPE, torch.bfloat16)):
            back = empty(names, *form)
            assert controller.load(back) == [True]
            assert same(back, objects(names, *form))


def test_a_lookup_without_a_layout_takes_that_of_the_last_store() -> None:
    with running() as controller:
        names = keys(2)
        controller.store(objects(names[:1]))
        assert controller.look_up(names, {0: MemoryLayoutDesc([], [])}) == [True, False]


@pytest.mark.parametrize(
    "changed", [{"revision": "r2"}, {"namespace": "b"}, {"block_bytes": "32KiB"}, {"version": "0.6.0"}]
)
def test_another_model_finds_nothing_after_a_restart_and_the_same_one_does(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    tier = {"type": "local", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    names = keys(4)
    with running(secondary=[tier]) as controller:
        assert controller.store(objects(names))
    with running(secondary=[tier], **changed) as controller:
        assert controller.look_up(names, DESC) == [False] * 4
    with running(secondary=[tier]) as controller:
        assert controller.look_up(names, DESC) == [True] * 4
        back = empty(names)
        assert controller.load(back) == [True] * 4
    assert same(back, objects(names))


def test_an_object_outside_of_cpu_memory_is_a_miss() -> None:
    with running() as controller:
        names = keys(2)
        content = objects(names)
        content[names[1]] = GDSMemoryObject(torch.zeros(SHAPE, dtype=torch.bfloat16))
        assert not controller.store(content)
        assert controller.look_up(names, DESC) == [True, False]


# ------------------------------------------------------------------------------------------------ notices, deletions


def test_lmcache_counts_what_is_stored_and_what_no_tier_holds_any_more() -> None:
    with running(secondary=[{"type": "memory", "capacity": "1MiB"}], primary={"capacity": "256KiB"}) as controller:
        adapter, names = controller.adapter, keys(100)
        fill(controller, names[:2])
        assert controller.store(objects(names[:1]))  # again: it is not counted twice
        assert adapter.listener.stored == [(key, 32768) for key in names[:2]]
        fill(controller, names[2:])
        assert until(lambda: len(adapter.listener.deleted) > 50)
        held = [key for key in names if is_held(controller, key)]
        assert until(lambda: adapter.used == len(held) * 32768)
        assert not set(held).intersection(adapter.listener.deleted)
        controller.load(empty(held[:1]))
        assert adapter.listener.accessed == held[:1]
        assert adapter.max_capacity_bytes == 1 << 20


def test_a_deleted_object_is_a_miss_until_it_is_stored_again() -> None:
    with running() as controller:
        names = keys(3)
        controller.store(objects(names))
        controller.adapter.delete([*names[:2], *keys(1, first=50)])
        controller.adapter.delete(names[:2])
        assert controller.adapter.listener.deleted == names[:2]
        assert controller.look_up(names, DESC) == [False, False, True]
        assert controller.load(empty(names)) == [False, False, True]
        assert controller.store(objects(names[:1]))
        assert controller.adapter.used == 2 * 32768
        assert controller.load(empty(names)) == [True, False, True]


def test_the_record_of_objects_is_bounded() -> None:
    ledger, layout = Ledger(most=10), Layout(8192, "text")
    for number in range(40):
        parts = [bytes([number, part]) * 20 for part in range(2)]
        ledger.note([OffloadingEvent(parts, "CPU", "LOCAL", "cpu", removed=False)])
        assert ledger.add(number, layout, parts) == (True, 0)
    assert len(ledger) == 5
    assert ledger.delete([3, 38]) == [(38, 8192)]
    assert len(ledger._tiers) <= 22
    assert ledger.note([OffloadingEvent([bytes([39, 0]) * 20], "CPU", "LOCAL", "cpu", removed=True)]) == [(39, 8192)]


def test_a_listener_that_fails_fails_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as controller:
        for name in ("stored", "accessed"):
            monkeypatch.setattr(controller.adapter, f"_notify_keys_{name}", lambda *_: 1 / 0)
        assert controller.store(objects(keys(1)))
        assert controller.load(empty(keys(1))) == [True]


# ---------------------------------------------------------------------------------------------------- trouble, threads


def test_loads_from_a_medium_that_hangs_end_at_their_deadline_and_leave_the_memory_alone(
    gate: Callable[[str], threading.Event],
) -> None:
    small: dict[str, Any] = {"primary": {"capacity": "256KiB"}, "deadline": "0.5s", "shutdown_deadline": "0.1s"}
    with running(**small) as controller:
        names = keys(30)
        fill(controller, names)
        called = gate("get_one")
        adapter, back = controller.adapter, empty(names[:2])
        tasks = [adapter.submit_load_task(list(back), list(back.values())) for _ in range(9)]
        results: dict[int, Any] = {}

        def ended() -> bool:
            results.update({n: found for n in tasks if (found := adapter.query_load_result(n)) is not None})
            return len(results) == 9

        assert until(ended)
        assert called.is_set()
        assert not any(found.test(0) or found.test(1) for found in results.values())
        assert controller.look_up(names[-1:], DESC) == [True]
        assert not any(each.raw_data.any() for each in back.values())
        assert until(lambda: adapter.report_status()["late_calls"] >= 4)


def test_stores_to_a_medium_that_hangs_end_and_what_is_lost_is_reported(gate: Callable[[str], threading.Event]) -> None:
    with running(primary={"capacity": "256KiB"}, deadline="0.5s", shutdown_deadline="0.1s") as controller:
        called = gate("put_one")
        for key in keys(12):
            controller.store(objects([key]))
        assert called.is_set()
        assert until(lambda: len(controller.adapter.listener.deleted) > 0)
        assert not controller.look_up(controller.adapter.listener.deleted[:1], DESC)[0]


def test_an_error_of_the_thread_makes_misses_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as controller:
        monkeypatch.setattr("tiering.manager.manager.TieringOffloadingManager.held", lambda *_: 1 / 0)
        assert controller.look_up(keys(2), DESC) == [False, False]
        assert not controller.store(objects(keys(2)))
        assert controller.load(empty(keys(2))) == [False, False]
        assert not controller.adapter.report_status()["is_healthy"]


def test_an_error_of_a_task_is_logged_and_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with running() as controller, caplog.at_level(logging.ERROR, "kv_tiering"):
        monkeypatch.setattr(controller.adapter._exchange, "load", lambda *_, **__: 1 / 0)
        assert controller.load(empty(keys(2))) == [False, False]
        assert not controller.store({keys(1)[0]: object()})
    assert "a task of LMCache failed" in caplog.text


def test_tasks_of_a_closed_adapter_end_or_are_never_reported_and_its_threads_end() -> None:
    before = set(threading.enumerate())
    with running() as controller:
        descriptors = {
            controller.adapter.get_store_event_fd(),
            controller.adapter.get_lookup_and_lock_event_fd(),
            controller.adapter.get_load_event_fd(),
        }
        assert len(descriptors) == 3
        controller.adapter.submit_store_task(keys(1), list(objects(keys(1)).values()))
    assert until(lambda: set(threading.enumerate()) <= before)
    assert controller.adapter.submit_load_task(keys(1), list(empty(keys(1)).values())) >= 0


@pytest.mark.parametrize("thread", ["kv-tiering-manager", "kv-tiering-store", "kv-tiering-load-2"])
def test_a_thread_that_cannot_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    before = set(threading.enumerate())
    limit = ThreadLimit(monkeypatch)
    limit.reach(thread)
    with installed() as create, pytest.raises(TierUnavailableError, match="raise the limit on threads"):
        create({**PLUGIN, "adapter_params": params()})
    assert until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"revision": None}, "revision: is missing: LMCache's keys"),
        ({"deadline": "1m"}, "deadline: 60 s is not allowed: above 0, and 25 s at most"),
        ({"deadline": "soon"}, "deadline: "),
        ({"block_bytes": 5000}, "block_bytes: 5000 is not allowed: a multiple of 4096"),
        ({"block_bytes": "much"}, "block_bytes: "),
        ({"secondary": []}, "secondary: is missing: LMCache has a CPU tier"),
        ({"events": True}, "events: has no effect in LMCache"),
        ({"keep_secondary": True}, "keep_secondary: has no effect in LMCache"),
        ({"reset_deadline": "1s"}, "reset_deadline: has no effect in LMCache"),
        (
            {"secondary": [{"type": "memory", "capacity": "1GiB", "min_prefix_blocks": 2}]},
            r"secondary\[0\].min_prefix_blocks: hides a tier from LMCache",
        ),
        ({"chunk_size": 256}, "chunk_size: unknown word"),
    ],
)
def test_what_is_wrong_in_the_dictionary_is_refused(changed: dict[str, Any], text: str) -> None:
    with installed() as create, pytest.raises(ConfigError, match=text):
        create({**PLUGIN, "adapter_params": params(**changed)})


def test_the_methods_have_the_signatures_of_lmcache() -> None:
    with installed():
        from tiering.engines.lmcache import KVTieringAdapter

        for name, parameters in METHODS.items():
            assert tuple(inspect.signature(getattr(KVTieringAdapter, name)).parameters)[1:] == parameters, name
