"""The storage backend in the real SGLang: its factory builds it, and its controllers drive it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from sglang.version import __version__ as version

from tests.engines.sglang import double
from tiering.engines.sglang.identity import SETTINGS
from tiering.errors import ConfigError

PAGE = 4
WORDS: dict[str, Any] = {
    "backend_name": "kv_tiering",
    "module_path": "tiering.engines.sglang",
    "class_name": "KVTieringStorage",
    "interface_v1": 1,
    "revision": "r1",
    "primary": {"capacity": "4MiB"},
    "shutdown_deadline": "5s",
}


def host_pool(layout: str, pages: int = 32) -> Any:
    k, v = ([torch.zeros((PAGE * pages, 2, 64), dtype=torch.bfloat16) for _ in range(3)] for _ in range(2))
    pointers = [torch.tensor([each.data_ptr() for each in half], dtype=torch.uint64) for half in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(k),
            v=tuple(v),
            k_data_ptrs=pointers[0],
            v_data_ptrs=pointers[1],
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE,
        head_num=2,
        head_dim=64,
        v_head_dim=64,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        info,
        1.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=PAGE * pages,
        start_layer=0,
        end_layer=3,
        host_token_capacity=PAGE * pages,
    )
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).to(torch.bfloat16))
    return pool


def config(**extra: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "org/model", extra_config={**WORDS, **extra})


@contextmanager
def attached(pool: Any, tmp_path: Path, **extra: Any) -> Iterator[Any]:
    """Attach the backend as SGLang's controller does."""
    tier = {"type": "local", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with get_context().override_server_args():
        backend = StorageBackendFactory.create_backend("dynamic", config(secondary=[tier], **extra), pool)
        backend.register_mem_pool_host(pool)
        backend.on_host_pools_registered()
        try:
            yield backend
        finally:
            backend.close()


def controller(pool: Any, backend: Any) -> Any:
    """Return what the storage threads of SGLang's controller use of it."""
    return SimpleNamespace(
        storage_backend=backend,
        storage_host_pool=pool,
        mem_pool_host=pool,
        page_size=PAGE,
        get_hash_str=None,
        prefetch_sync_queue=Queue(),
    )


def keys_of(tokens: int) -> Any:
    return list(range(tokens))


def test_the_stand_in_has_the_interface_of_the_installed_version() -> None:
    assert version == double.VERSION
    for name, parameters in double.METHODS.items():
        assert tuple(inspect.signature(getattr(HiCacheStorage, name)).parameters)[1:] == parameters, name
    assert {name for name in vars(HiCacheStorage) if not name.startswith("_")} == set(double.METHODS)
    assert {each.name for each in dataclasses.fields(HiCacheStorageConfig)} == set(double.CONFIG)
    for ours, theirs in ((double.PoolTransfer, PoolTransfer), (double.PoolTransferResult, PoolTransferResult)):
        assert [each.name for each in dataclasses.fields(ours)] == [each.name for each in dataclasses.fields(theirs)]
    assert [policy.value for policy in PoolHitPolicy] == [policy.value for policy in double.PoolHitPolicy]


def test_every_setting_of_the_identity_is_one_of_this_version() -> None:
    with get_context().override_server_args():
        for name in (*SETTINGS, *double.LEAVES):
            get_context().config_leaf(name)
        assert set(SETTINGS) <= set(ServerArgs.__struct_fields__)


@pytest.mark.parametrize(
    ("layout", "interface"), [("page_first", 1), ("layer_first", 1), ("page_first_direct", 1), ("layer_first", 0)]
)
def test_what_sglangs_controller_backs_up_comes_back_after_a_restart(
    tmp_path: Path, layout: str, interface: int
) -> None:
    pool = host_pool(layout)
    tokens = keys_of(10 * PAGE)
    set_pages = HiCacheController._page_set_zero_copy if interface else HiCacheController._generic_page_set
    get_pages = HiCacheController._page_get_zero_copy if interface else HiCacheController._generic_page_get
    with attached(pool, tmp_path, interface_v1=interface) as backend:
        theirs = controller(pool, backend)
        operation = SimpleNamespace(
            token_ids=tokens, last_hash=None, prefix_keys=None, host_indices=pool.alloc(len(tokens)), completed_tokens=0
        )
        assert HiCacheController._storage_hit_query(theirs, operation) == ([], 0)
        operation.hash_value = operation.all_hash_values
        theirs.page_set_func = lambda *arguments: set_pages(theirs, *arguments)
        HiCacheController._page_backup(theirs, operation)
        assert operation.completed_tokens == len(tokens)
    stored = [pool.get_data_page(int(operation.host_indices[n * PAGE])).clone() for n in range(10)]
    with attached(pool, tmp_path, interface_v1=interface) as backend:
        theirs = controller(pool, backend)
        found, hits = HiCacheController._storage_hit_query(theirs, operation)
        assert hits == len(tokens)
        places = pool.alloc(len(tokens))
        pool.kv_buffer.zero_()
        running = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        assert get_pages(theirs, running, found, places) == 10
        assert all(torch.equal(pool.get_data_page(int(places[n * PAGE])), stored[n]) for n in range(10))


def test_sidecars_of_the_hybrid_controller_are_stored_and_found(tmp_path: Path) -> None:
    pool, window = host_pool("page_first"), host_pool("layer_first")
    tier = {"type": "local", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with get_context().override_server_args():
        backend = StorageBackendFactory.create_backend("dynamic", config(secondary=[tier]), pool)
        backend.register_mem_pool_host(pool)
        for name, each in ((PoolName.KV, pool), (PoolName.SWA, window)):
            backend.register_mem_host_pool_v2(each, name)
        backend.on_host_pools_registered()
        try:
            theirs = controller(pool, backend)
            theirs.backup_skip = False
            theirs.should_backup = lambda transfer: True
            for name in ("_resolve_sidecar_kv_derived_pool_transfers", "_resolve_sidecar_nonkv_derived_pool_transfers"):
                setattr(theirs, name, lambda operation: None)
            tokens = keys_of(8 * PAGE)
            operation = SimpleNamespace(
                token_ids=tokens, last_hash=None, prefix_keys=None, assume_stored=False, completed_tokens=0
            )
            operation.pool_storage_result = PoolTransferResult.empty()
            operation.pool_transfers = [PoolTransfer(PoolName.SWA, hit_policy=PoolHitPolicy.TRAILING_PAGES)]
            assert HybridCacheController._storage_hit_query(theirs, operation) == ([], 0)
            hashes = operation.all_hash_values
            assert backend.batch_set_v1(hashes, pool.alloc(len(tokens))) == [True] * 8
            pages = PoolTransfer(PoolName.SWA, window.alloc(2 * PAGE), keys=hashes[4:6])
            assert backend.batch_set_v2([pages]) == {PoolName.SWA: [True, True]}
            operation.pool_transfers[0].keys = hashes[6:]
            found, tokens_held = HybridCacheController._storage_hit_query(theirs, operation)
            assert (len(found), tokens_held) == (6, 6 * PAGE)
            assert operation.pool_storage_result.restorable_prefix_pages == [6]
            assert operation.query_pool_hit_pages == {PoolName.KV: 8, PoolName.SWA: 6}
        finally:
            backend.close()


def test_a_dictionary_that_is_wrong_fails_the_attach(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="revision: missing"),
        attached(host_pool("page_first"), tmp_path, revision=None),
    ):
        pass


def test_weights_that_sglang_replaces_end_the_epoch(tmp_path: Path) -> None:
    pool = host_pool("page_first")
    with attached(pool, tmp_path) as backend:
        assert backend.batch_set_v1(["a" * 64], pool.alloc(PAGE)) == [True]
        assert backend.batch_exists(["a" * 64]) == 1
        get_context().override("scheduler.weight_version", weight_version="step-1")
        assert backend.batch_exists(["a" * 64]) == 0
