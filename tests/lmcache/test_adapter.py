"""The L2 adapter in the real LMCache: its factory builds it, and its controllers drive it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache import __version__ as version
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager

from tests.engines.lmcache import double
from tiering.testing.clock import until

LAYOUT = MemoryLayoutDesc([torch.Size((2, 4, 16, 64))], [torch.bfloat16])
KEYS = [ObjectKey(n.to_bytes(32, "big"), "org/model", ObjectKey.ComputeKVRank(1, 0, 1, 0)) for n in range(24)]


def plugin(path: Path, **changed: Any) -> str:
    tier = {"type": "local", "path": str(path / "kv"), "capacity": "256MiB"}
    stack = {"primary": {"capacity": "4MiB"}, "secondary": [tier], "revision": "r1", "block_bytes": "8KiB"}
    words = {"module_path": "tiering.engines.lmcache", "class_name": "KVTieringAdapter"}
    return json.dumps({"type": "plugin", **words, "adapter_params": {**stack, **changed}})


@contextmanager
def storage(adapter: str) -> Iterator[StorageManager]:
    """Run LMCache's storage manager over an adapter."""
    manager = StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")),
            EvictionConfig("LRU"),
            parse_args_to_l2_adapters_config(Namespace(l2_adapter=[adapter])),
        )
    )
    try:
        yield manager
    finally:
        manager.close()


def the_adapter(manager: StorageManager) -> Any:
    return manager.l2_adapters()[0][1]


def counts(manager: StorageManager, number: int) -> bool:
    return bool(the_adapter(manager).report_status()["objects"] == number)


def write(manager: StorageManager, keys: Sequence[ObjectKey]) -> None:
    """Write objects into LMCache's L1, from where its store controller takes them."""
    for key, memory in manager.reserve_write(list(keys), LAYOUT).items():
        memory.tensor.copy_(content(key))
    manager.finish_write(list(keys))


def content(key: ObjectKey) -> torch.Tensor:
    generator = torch.Generator().manual_seed(int.from_bytes(key.chunk_hash, "big"))
    return torch.randn(tuple(LAYOUT.shapes[0]), generator=generator).to(torch.bfloat16)


def prefetch(manager: StorageManager, keys: Sequence[ObjectKey], layout: MemoryLayoutDesc = LAYOUT) -> Any:
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(list(keys), 0, layout)]))
    assert manager.wait_prefetch_status(handle, 30.0)
    return manager.query_prefetch_status(handle)


def test_objects_come_back_after_a_restart_with_the_same_bytes_and_not_to_another_layout(tmp_path: Path) -> None:
    with storage(plugin(tmp_path)) as manager:
        write(manager, KEYS[:8])
        assert until(lambda: manager.get_usage_bytes_by_cache_salt() == {"": 8 * 16384})
    with storage(plugin(tmp_path)) as manager:
        other = MemoryLayoutDesc(LAYOUT.shapes, [torch.float16])
        assert prefetch(manager, KEYS[:8], other).l2_hit_cells[0].popcount() == 0
        found = prefetch(manager, KEYS[:12])
        assert found.l2_hit_cells[0].count_leading_ones() == 8
        for key, (_, memory) in manager._l1_manager.unsafe_read(KEYS[:8]).items():
            assert torch.equal(memory.tensor, content(key))
        manager.finish_read_prefetched(KEYS[:8])
        assert manager.report_status()["is_healthy"]
    with storage(plugin(tmp_path, revision="r2")) as manager:
        assert prefetch(manager, KEYS[:8]).l2_hit_cells[0].popcount() == 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], threading.Event]]:
    """Let loads from the medium hang, until the test has ended."""
    opened = threading.Event()

    def hang() -> threading.Event:
        called = threading.Event()

        def method(*arguments: Any) -> Any:
            called.set()
            opened.wait()
            raise OSError("gone")

        monkeypatch.setattr("tiers.memory.MemoryStore.get_one", method)
        return called

    yield hang
    opened.set()


def test_a_medium_that_hangs_holds_up_neither_prefetches_nor_the_close(
    tmp_path: Path, gate: Callable[[], threading.Event]
) -> None:
    small: dict[str, Any] = {"primary": {"capacity": "128KiB"}, "secondary": [{"type": "memory", "capacity": "16MiB"}]}
    with storage(plugin(tmp_path, **small, deadline="0.5s", shutdown_deadline="0.1s")) as manager:
        for number, key in enumerate(KEYS, 1):
            write(manager, [key])
            assert until(partial(counts, manager, number))
        assert until(lambda: not manager._store_controller._in_flight_tasks)
        manager.clear(force=True)
        called = gate()
        assert prefetch(manager, KEYS[:4]).l2_hit_cells[0].popcount() == 0
        assert called.is_set()
        assert until(lambda: the_adapter(manager).report_status()["late_calls"] == 1)
        manager.delete_l2_adapter(0)


def test_quotas_delete_objects_which_then_are_misses(tmp_path: Path) -> None:
    adapter = json.loads(plugin(tmp_path))
    adapter["eviction"] = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 0.5, "eviction_ratio": 1.0}
    with storage(json.dumps(adapter)) as manager:
        write(manager, KEYS[:4])
        assert until(lambda: the_adapter(manager).report_status()["objects"] == 4)
        assert until(lambda: manager.get_usage_bytes_by_cache_salt() == {}, 30.0)  # no quota: nothing may stay
        manager.clear(force=True)
        assert prefetch(manager, KEYS[:4]).l2_hit_cells[0].popcount() == 0


def test_lmcaches_own_benchmark_verifies_what_it_loads(tmp_path: Path) -> None:
    command = [*(sys.executable, "-m", "lmcache.cli.main", "bench", "l2"), "--l2-adapter", plugin(tmp_path)]
    options = ["--no-skip-verify", "--rounds", "3", "--num-keys", "16", "--data-size-kb", "100", "--in-flight", "3"]
    shown = subprocess.run([*command, *options], capture_output=True, text=True, timeout=110, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "keys data verified OK" in shown.stdout
    assert "MISMATCH" not in shown.stdout


def test_the_stand_in_has_the_signatures_of_lmcache() -> None:
    assert version == double.VERSION
    for name, parameters in (double.METHODS | double.NOTICES).items():
        assert tuple(inspect.signature(getattr(L2AdapterInterface, name)).parameters)[1:] == parameters, name
    assert L2AdapterInterface.__abstractmethods__ == set(double.METHODS) - double.OPTIONAL
    for kind, real in ((double.ObjectKey, ObjectKey), (double.MemoryLayoutDesc, MemoryLayoutDesc)):
        assert [each.name for each in dataclasses.fields(kind)] == [each.name for each in dataclasses.fields(real)]
    assert {"set", "test"} <= set(dir(Bitmap))
