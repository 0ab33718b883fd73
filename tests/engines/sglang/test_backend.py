"""The storage backend for SGLang's HiCache, over a stand-in for SGLang."""

from __future__ import annotations

import hashlib
import inspect
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.sglang.double import (
    METHODS,
    Context,
    LogicalHostPool,
    MambaPoolHost,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    PageInterleaveHostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    config_of,
    installed,
)
from tests.fake_s3 import FakeS3
from tiering.errors import ConfigError
from tiering.testing.clock import until

MEMORY: dict[str, Any] = {"type": "memory", "capacity": "64MiB"}
WORDS = {"backend_name": "kv_tiering", "module_path": "tiering.engines.sglang", "class_name": "KVTieringStorage"}


def hashes(number: int, first: int = 0) -> list[str]:
    return [hashlib.sha256(str(index).encode()).hexdigest() for index in range(first, first + number)]


def words(**changed: Any) -> dict[str, Any]:
    stack = {"primary": {"capacity": "4MiB"}, "secondary": [MEMORY], "revision": "r1", "shutdown_deadline": "5s"}
    return {**WORDS, "interface_v1": 1, **stack, **changed}


@contextmanager
def running(
    pool: Any = None,
    *,
    pools: Mapping[PoolName, Any] | None = None,
    context: Context | None = None,
    config: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Iterator[Any]:
    """Attach the backend as SGLang does, and detach it at the end."""
    with installed(context or Context()) as create:
        backend = create(config_of(words(**changed), **(config or {})))
        try:
            backend.register_mem_pool_host(MHATokenToKVPoolHost() if pool is None else pool)
            for name, other in (pools or {}).items():
                backend.register_mem_host_pool_v2(other, name)
            backend.on_host_pools_registered()
            yield backend
        finally:
            backend.close()
            backend.close()


def all_found(backend: Any, keys: Sequence[str]) -> bool:
    return bool(backend.batch_exists(keys) == len(keys))


def in_thread(method: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call in a thread of its own, as SGLang has new ones after a flush."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(method, *arguments).result()


def wipe(pool: Any) -> torch.Tensor:
    """Overwrite a pool, and return what it held."""
    before: torch.Tensor = pool.kv_buffer.clone()
    pool.kv_buffer.fill_(0)
    return before


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_to_other_places_with_the_same_bytes(layout: str) -> None:
    pool = MHATokenToKVPoolHost(layout)
    with running(pool) as backend:
        keys = hashes(10)
        assert backend.batch_set_v1(keys, pool.indices(*range(10))) == [True] * 10
        assert backend.batch_exists([*keys, *hashes(3, first=90)]) == 10
        assert backend.exists(keys[3])
        before = wipe(pool)
        assert backend.batch_get_v1(keys, pool.indices(*range(20, 30))) == [True] * 10
        pages = slice(80, 120), slice(0, 40)
        back, stored = (
            (pool.kv_buffer[:, pages[0]], before[:, pages[1]])
            if layout == "page_first"
            else (pool.kv_buffer[:, :, pages[0]], before[:, :, pages[1]])
        )
        assert torch.equal(back, stored)
        assert not pool.kv_buffer.flatten()[: pool.width].any()


def test_pages_leave_the_memory_and_come_back_in_parts_of_it() -> None:
    pool = MHATokenToKVPoolHost(pages=600)
    with running(pool, primary={"capacity": "512KiB"}) as backend:
        keys = hashes(300)
        for start in range(0, 300, 30):
            span = range(start, start + 30)
            assert all(backend.batch_set_v1(keys[start : start + 30], pool.indices(*span)))
            assert until(partial(all_found, backend, keys[: start + 30]))
        before = wipe(pool)
        assert all(backend.batch_get_v1(keys, pool.indices(*range(300, 600))))
        assert torch.equal(pool.kv_buffer[:, 1200:], before[:, :1200])


def test_whole_pages_are_stored_and_filled_where_the_dictionary_does_not_ask_for_parts() -> None:
    pool = MHATokenToKVPoolHost("layer_first")
    with running(pool, interface_v1=0) as backend:
        keys = hashes(5)
        pages = [pool.get_data_page(index * 4) for index in range(5)]
        assert backend.batch_set(keys, pages)
        assert backend.set(hashes(1, first=8)[0], pages[1])
        targets = [pool.get_dummy_flat_data_page() for _ in range(7)]
        found = backend.batch_get([*keys, *hashes(2, first=70)], targets)
        assert [page is not None for page in found] == [True] * 5 + [False] * 2
        assert all(torch.equal(page, stored) for page, stored in zip(found, pages, strict=False))
        assert torch.equal(backend.get(hashes(1, first=8)[0], pool.get_dummy_flat_data_page()), pages[1])
        assert backend.get(keys[0]) is None
        assert not backend.batch_set(keys, [page[:-1] for page in pages])
        assert not backend.batch_set(keys, pages[:-1])
        assert backend.batch_get(keys, pages[:-1]) == [None] * 5
        assert backend.batch_set_v1(hashes(1, first=20), pool.indices(0)) == [False]


def test_a_prefix_ends_at_the_first_page_that_is_missing() -> None:
    pool = MHATokenToKVPoolHost()
    with running(pool) as backend:
        keys = hashes(8)
        backend.batch_set_v1(keys[:3], pool.indices(0, 1, 2))
        backend.batch_set_v1(keys[5:], pool.indices(5, 6, 7))
        assert backend.batch_exists(keys) == 3
        assert backend.batch_get_v1(keys, pool.indices(*range(20, 28))) == [True] * 3 + [False] * 5


def test_states_at_some_ends_of_a_prefix_give_a_set_of_lengths() -> None:
    pool, states = MHATokenToKVPoolHost(), MambaPoolHost()
    with running(pool, pools={PoolName.KV: pool, PoolName.MAMBA: states}) as backend:
        keys = hashes(8)
        backend.batch_set_v1(keys[:6], pool.indices(*range(6)))
        for page in (1, 4, 7):
            stored = PoolTransfer(PoolName.MAMBA, states.indices(page), keys=[keys[page]])
            assert backend.batch_set_v2([stored]) == {PoolName.MAMBA: [True]}
        wanted = PoolTransfer(PoolName.MAMBA, keys=[keys[7]], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = backend.batch_exists_v2(keys, [wanted])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [2, 5])
        assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 5}
        before = wipe(states)
        loaded = backend.batch_get_v2([PoolTransfer(PoolName.MAMBA, states.indices(30), keys=[keys[4]])])
        assert loaded == {PoolName.MAMBA: [True]}
        assert torch.equal(states.get_data_page(30), before[:, 4:5].flatten())


def test_a_window_counts_where_all_its_pages_are_held() -> None:
    pool, window = MHATokenToKVPoolHost(), MHATokenToKVPoolHost("layer_first")
    with running(pool, pools={PoolName.SWA: window}) as backend:
        keys = hashes(8)
        backend.batch_set_v1(keys, pool.indices(*range(8)))
        for pages in ((0,), (3, 4), (6, 7)):
            stored = PoolTransfer(PoolName.SWA, window.indices(*pages), keys=[keys[page] for page in pages])
            assert backend.batch_set_v2([stored]) == {PoolName.SWA: [True] * len(pages)}
        wanted = PoolTransfer(PoolName.SWA, keys=keys[6:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        found = backend.batch_exists_v2(keys, [wanted])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (8, [1, 5, 8])


def test_a_pool_that_needs_all_pages_cuts_the_prefix_and_groups_only_report() -> None:
    pool, other = MHATokenToKVPoolHost(), MHATokenToKVPoolHost()
    with running(pool, pools={PoolName.INDEXER: other, PoolName.DRAFT: other}) as backend:
        keys = hashes(8)
        backend.batch_set_v1(keys, pool.indices(*range(8)))
        for name in (PoolName.INDEXER, PoolName.DRAFT):
            backend.batch_set_v2([PoolTransfer(name, other.indices(*range(5)), keys=keys[:5])])
        groups = PoolTransfer(PoolName.DRAFT, keys=keys, block_pages=16, group_pages=2)
        groups.hit_policy = PoolHitPolicy.BLOCK_GROUPS
        found = backend.batch_exists_v2(keys, [groups, PoolTransfer(PoolName.INDEXER)])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (5, [1, 2, 3, 4, 5])
        assert found.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.INDEXER: 5, PoolName.DRAFT: 32}


def test_a_logical_pool_of_kv_lacks_nothing_and_the_others_decide() -> None:
    pool, other = LogicalHostPool(), MHATokenToKVPoolHost()
    with running(pool, pools={PoolName.INDEXER: other}) as backend:
        keys = hashes(4)
        assert backend.batch_set_v1(keys, torch.arange(16)) == [True] * 4
        backend.batch_set_v2([PoolTransfer(PoolName.INDEXER, other.indices(0, 1), keys=keys[:2])])
        assert backend.batch_exists_v2(keys, [PoolTransfer(PoolName.INDEXER)]).kv_hit_pages == 2
        assert backend.batch_get_v1(keys, torch.arange(16)) == [True] * 4
        assert backend.batch_get_v2([PoolTransfer(PoolName.SWA, torch.arange(1), keys=keys[:1])]) == {
            PoolName.SWA: [False]
        }
    assert backend.batch_exists(keys) == 0


def test_indices_that_do_not_fit_move_nothing_and_results_keep_their_length() -> None:
    pool, other = MHATokenToKVPoolHost(), MambaPoolHost()
    with running(pool, pools={PoolName.MAMBA: other}) as backend:
        keys = hashes(3)
        before = pool.kv_buffer.clone()
        for indices in (pool.indices(0, 1), pool.indices(0, 1, 2)[:-1]):
            assert backend.batch_set_v1(keys, indices) == [False] * 3
            assert backend.batch_get_v1(keys, indices) == [False] * 3
        transfer = PoolTransfer(PoolName.MAMBA, None, keys=keys)
        assert backend.batch_get_v2([transfer]) == {PoolName.MAMBA: [False] * 3}
        assert backend.batch_set_v2([transfer, PoolTransfer(PoolName.KV)]) == {
            PoolName.MAMBA: [False] * 3,
            PoolName.KV: [],
        }
        assert backend.batch_get_v1(keys[:1] * 2, pool.indices(0, 1)) == [False] * 2
        assert torch.equal(pool.kv_buffer, before)


def test_every_method_has_the_parameters_of_the_contract() -> None:
    with installed(Context()):
        from tiering.engines.sglang import KVTieringStorage

        for name, parameters in METHODS.items():
            given = tuple(inspect.signature(getattr(KVTieringStorage, name)).parameters)[1:]
            assert given == parameters, name


# -------------------------------------------------------------------------------------------------------- who shares


def same(**changed: Any) -> dict[str, Any]:
    return {"pool": MHATokenToKVPoolHost(), "context": None, "config": {}, "extra": {}, **changed}


OTHERS = {
    "revision": same(extra={"revision": "r2"}),
    "namespace": same(extra={"namespace": "b"}),
    "interface": same(extra={"interface_v1": 0}),
    "cache dtype": same(context=Context({"kv_cache_dtype": "fp8_e5m2"})),
    "quantization": same(context=Context({"quantization": "awq"})),
    "overrides": same(context=Context({"json_model_override_args": '{"rope_theta": 1}'})),
    "name": same(config={"model_name": "org/other"}),
    "element type": same(pool=MHATokenToKVPoolHost(dtype=torch.float16)),
    "page size": same(pool=MHATokenToKVPoolHost(page_size=8)),
    "host layout": same(pool=MHATokenToKVPoolHost("layer_first")),
    "pipeline stage": same(config={"pp_rank": 1, "pp_size": 2}),
    "tensor-parallel size": same(config={"tp_size": 2}),
    "context-parallel rank": same(config={"attn_cp_rank": 1, "attn_cp_size": 2}),
}


def in_bucket(bucket: FakeS3) -> dict[str, Any]:
    return {"type": "s3", "bucket": bucket.bucket, "prefix": "kv/", "endpoint_url": bucket.endpoint, "ttl": "1d"}


def check_that_only_equals_share(tier: dict[str, Any], others: Sequence[dict[str, Any]]) -> None:
    keys, pool = hashes(4), MHATokenToKVPoolHost()
    with running(pool, secondary=[tier]) as backend:
        assert all(backend.batch_set_v1(keys, pool.indices(*range(4))))
    for found in others:
        engine = running(
            found["pool"], context=found["context"], config=found["config"], secondary=[tier], **found["extra"]
        )
        with engine as backend:
            assert backend.batch_exists(keys) == 0, found
    before = wipe(pool)
    with running(pool, secondary=[tier]) as backend:
        assert until(lambda: all_found(backend, keys))  # a busy disk is recovered in the background after 2 s
        assert all(backend.batch_get_v1(keys, pool.indices(*range(4))))
    assert torch.equal(pool.kv_buffer[:, :16], before[:, :16])


@pytest.mark.parametrize("other", [name for name, found in OTHERS.items() if "_size" not in str(found["config"])])
def test_an_engine_with_another_model_or_layout_finds_nothing_and_an_equal_one_does(tmp_path: Path, other: str) -> None:
    tier = {"type": "local", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    check_that_only_equals_share(tier, [OTHERS[other]])


def test_an_engine_with_other_ranks_finds_nothing_and_an_equal_one_does(bucket: FakeS3) -> None:
    others = [found for found in OTHERS.values() if "_size" in str(found["config"])]
    assert len(others) == 3
    check_that_only_equals_share(in_bucket(bucket), others)


@pytest.mark.parametrize(("kind", "shared"), [(MLATokenToKVPoolHost, 4), (MHATokenToKVPoolHost, 0)])
def test_ranks_share_only_what_is_the_same_on_all_of_them(bucket: FakeS3, kind: Any, shared: int) -> None:
    tier = in_bucket(bucket)
    first, second = ({"is_mla_model": True, "tp_size": 2, "tp_rank": rank} for rank in (0, 1))
    keys, pool = hashes(4), kind()
    with running(pool, secondary=[tier], config=first) as backend:
        assert all(backend.batch_set_v1(keys, pool.indices(*range(4))))
    with running(pool, secondary=[tier], config=second) as backend:
        assert backend.batch_exists(keys) == shared


def test_ranks_of_one_engine_use_a_disk_side_by_side(tmp_path: Path) -> None:
    tier = {"type": "local", "path": str(tmp_path / "kv"), "capacity": "64MiB"}
    with ExitStack() as engines:
        backends = [
            engines.enter_context(running(secondary=[tier], config={"tp_size": 2, "tp_rank": rank})) for rank in (0, 1)
        ]
        keys, pool = hashes(2), MHATokenToKVPoolHost()
        assert all(backends[0].batch_set_v1(keys, pool.indices(0, 1)))
        assert [backend.batch_exists(keys) for backend in backends] == [2, 0]
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == [
        "replica-dp0-pp0-cp0-tp0",
        "replica-dp0-pp0-cp0-tp1",
    ]


def test_a_pool_that_is_registered_late_opens_the_stack_again() -> None:
    pool, draft = MHATokenToKVPoolHost(), MHATokenToKVPoolHost()
    with running(pool) as backend:
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        stored = PoolTransfer(PoolName.DRAFT, draft.indices(0), keys=hashes(1))
        assert backend.batch_set_v2([stored]) == {PoolName.DRAFT: [True]}


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("context", "config", "extra", "text"),
    [
        ({}, {}, {"revision": None}, "revision: missing"),
        ({"revision": "main"}, {}, {"revision": None}, "revision: missing"),
        ({"enable_lora": True}, {}, {}, "enable_lora"),
        ({}, {"dcp_size": 2}, {}, "dcp_size"),
        ({}, {"is_mla_model": True, "tp_size": 2}, {}, "a tier that all reach"),
        ({}, {}, {"stack": "s.yaml"}, "stack: unknown word"),
        ({}, {}, {"config": "s.yaml"}, "keep one of the two"),
        ({}, {}, {"secondary": []}, "SGLang has a CPU tier of its own"),
        ({}, {}, {"events": True}, "SGLang"),
        ({}, {}, {"keep_secondary": True}, "keep_secondary: would serve pages of older weights"),
        ({}, {}, {"deadline": "1m"}, "deadline"),
        ({}, {}, {"deadline": "soon"}, "deadline"),
        ({"quantization_param_path": "/nowhere.json"}, {}, {}, "quantization_param_path"),
    ],
)
def test_what_could_give_wrong_pages_or_has_no_effect_is_refused(
    context: dict[str, Any], config: dict[str, Any], extra: dict[str, Any], text: str
) -> None:
    given = {word: value for word, value in words(**extra).items() if value is not None}

    def attach() -> None:
        with installed(Context(context)) as create:
            backend = create(config_of(given, **config))
            backend.register_mem_pool_host(MHATokenToKVPoolHost())
            backend.on_host_pools_registered()

    with pytest.raises(ConfigError, match=text):
        attach()


def test_a_pool_whose_pages_belong_to_several_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="PageInterleaveHostPool"), running(PageInterleaveHostPool()):
        pass


def test_the_commit_that_sglang_loads_names_the_weights() -> None:
    given = {word: value for word, value in words().items() if word != "revision"}
    with installed(Context({"revision": "0" * 40})) as create:
        assert create(config_of(given))._weights == "0" * 40


# ------------------------------------------------------------------------------------------- trouble, resets, threads


def test_a_load_from_a_medium_that_hangs_ends_at_the_deadline_and_leaves_the_pool_alone(
    gate: Callable[[str], threading.Event],
) -> None:
    pool = MHATokenToKVPoolHost()
    small: dict[str, Any] = {"primary": {"capacity": "256KiB"}, "deadline": "0.5s", "shutdown_deadline": "0.1s"}
    with running(pool, **small) as backend:
        keys = hashes(60)
        for start in range(0, 60, 6):
            backend.batch_set_v1(keys[start : start + 6], pool.indices(*range(start, start + 6)))
            assert until(partial(all_found, backend, keys[: start + 6]))
        called = gate("get_one")
        before = pool.kv_buffer.clone()
        assert backend.batch_get_v1(keys[:4], pool.indices(0, 1, 2, 3)) == [False] * 4
        assert called.is_set()
        assert until(lambda: backend._exchange.timeouts == 1)
        assert torch.equal(pool.kv_buffer, before)


def test_stores_to_a_medium_that_hangs_end(gate: Callable[[str], threading.Event]) -> None:
    pool = MHATokenToKVPoolHost()
    with running(pool, primary={"capacity": "256KiB"}, shutdown_deadline="0.1s") as backend:
        called = gate("put_one")
        for start in range(0, 60, 6):
            found = backend.batch_set_v1(hashes(6, first=start), pool.indices(*range(start, start + 6)))
            assert len(found) == 6
        assert called.is_set()


@pytest.mark.parametrize("how", ["clear", "weights"])
def test_no_older_page_is_found_after_a_reset(how: str) -> None:
    pool, context = MHATokenToKVPoolHost(), Context()
    context.log.append(("launch", {"model_path": "org/model"}))
    with running(pool, context=context) as backend:
        keys = hashes(4)
        backend.batch_set_v1(keys, pool.indices(0, 1, 2, 3))
        context.log.append(("other", {"gpu_id": 1}))
        assert backend.batch_exists(keys) == 4
        if how == "clear":
            assert backend.clear()
        else:
            context.log.append(("model_runner.update_model_fields", {"model_path": "org/model", "load_format": "auto"}))
        assert backend.batch_get_v1(keys, pool.indices(0, 1, 2, 3)) == [False] * 4
        assert backend.batch_exists(keys) == 0
        assert all(in_thread(backend.batch_set_v1, keys, pool.indices(0, 1, 2, 3)))
        assert backend.batch_exists(keys) == 4


def test_pages_of_the_older_weights_are_not_stored_by_a_backup_that_runs_over_the_replacement() -> None:
    pool, context = MHATokenToKVPoolHost(), Context()
    with running(pool, context=context) as backend:
        keys = hashes(4)
        assert backend.batch_set_v1(keys[:1], pool.indices(0)) == [True]
        context.log.append(("scheduler.weight_version", {"weight_version": "2"}))
        assert backend.batch_set_v1(keys[1:3], pool.indices(1, 2)) == [False, False]
        assert backend.batch_set_v1(keys[3:], pool.indices(3)) == [False]
        assert backend.batch_exists(keys) == 0
        assert in_thread(backend.batch_set_v1, keys[:1], pool.indices(0)) == [True]
        assert backend.batch_exists(keys) == 1


def test_a_store_during_which_the_weights_are_replaced_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, context = MHATokenToKVPoolHost(), Context()
    with running(pool, context=context) as backend:
        keys, store = hashes(2), type(backend._exchange).store

        def slow(*arguments: Any, **words: Any) -> Any:
            context.log.append(("scheduler.weight_version", {"weight_version": "2"}))
            assert in_thread(backend.batch_exists, keys) == 0
            return store(*arguments, **words)

        monkeypatch.setattr(type(backend._exchange), "store", slow)
        assert backend.batch_set_v1(keys, pool.indices(0, 1)) == [False, False]
        assert backend.batch_exists(keys) == 0


def test_an_error_of_the_thread_makes_misses_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = MHATokenToKVPoolHost()
    with running(pool) as backend:
        keys = hashes(2)
        monkeypatch.setattr(type(backend._exchange.manager), "held", lambda *_: 1 / 0)
        assert backend.batch_exists(keys) == 0
        assert backend._exchange.failed
        assert backend.batch_set_v1(keys, pool.indices(0, 1)) == [False, False]
        assert backend.batch_get_v1(keys, pool.indices(0, 1)) == [False, False]


def test_a_forked_child_misses() -> None:
    pool = MHATokenToKVPoolHost()
    with running(pool) as backend:
        backend.batch_set_v1(hashes(2), pool.indices(0, 1))
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writer, str(backend.batch_exists(hashes(2))).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reader, 10) == b"0"
        for end in (reader, writer):
            os.close(end)


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_store_and_load_at_the_same_time_never_get_other_bytes(seed: int) -> None:
    pool = MHATokenToKVPoolHost(pages=96)
    wanted = {name: pool.get_data_page(page * 4).clone() for page, name in enumerate(hashes(32))}
    wrong: list[str] = []
    with running(pool, primary={"capacity": "512KiB"}) as backend:

        def store() -> None:
            chance = random.Random(seed)
            for _ in range(30):
                first = chance.randrange(28)
                backend.batch_set_v1(hashes(4, first), pool.indices(*range(first, first + 4)))

        def load(lane: int) -> None:
            chance = random.Random(seed + lane)
            for _ in range(30):
                first, place = chance.randrange(28), 32 * lane + chance.randrange(28)
                done = backend.batch_get_v1(hashes(4, first), pool.indices(*range(place, place + 4)))
                for n, name in enumerate(hashes(4, first)):
                    if done[n] and not torch.equal(pool.get_data_page((place + n) * 4), wanted[name]):
                        wrong.append(name)

        threads = [threading.Thread(target=store), *(threading.Thread(target=load, args=(lane,)) for lane in (1, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert backend._exchange.timeouts == 0
    assert wrong == []
