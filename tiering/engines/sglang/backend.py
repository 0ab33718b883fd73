"""The class that SGLang loads: a storage backend that is a whole stack of this project.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kv_tiering", "module_path": "tiering.engines.sglang",
      "class_name": "KVTieringStorage", "interface_v1": 1, "config": "stack.yaml"}'

The stack's ``primary`` is memory of this project's own, through which all pages pass
(:mod:`tiering.engines.exchange`). Each host pool of SGLang is a KV-cache group, and each page is a block.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult
from sglang.srt.runtime_context import get_context
from sglang.version import __version__ as version

from tiering.api.keys import OffloadKey, make_offload_key
from tiering.config.inline import read_storage
from tiering.config.registry import tier_definition
from tiering.config.stack import open_manager
from tiering.engines.exchange import BlockExchange
from tiering.engines.mailbox import started
from tiering.engines.sglang.identity import WEIGHTS, model_identity, parallelism, rank_of, replica_of, weights_of
from tiering.engines.sglang.pages import PageMemory, page_memory, tensor_copies
from tiering.engines.vllm.logging import share_logging
from tiering.errors import ConfigError
from tiering.manager.prompts import CopyBlock

logger = logging.getLogger("kv_tiering.sglang")
share_logging(logging.getLogger("sglang"))

_KV = PoolName.KV.value


class KVTieringStorage(HiCacheStorage):  # type: ignore[misc]
    """A stack of tiers behind SGLang's host pools.

    Any thread may call all methods but :meth:`close` and the registrations. A call waits up to the deadline; what is
    not there by then is a miss.

    Args:
        storage_config: SGLang's configuration of a storage backend, whose ``extra_config`` is the dictionary.
        kwargs: SGLang's further arguments; there are none.

    Raises:
        TieringError: the dictionary is invalid, or the model is not identified. Raised when the backend is attached.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        given = dict(storage_config.extra_config or {})
        self._stack, self._deadline = read_storage(given)
        self._by_parts = bool(given.get("interface_v1", 0))
        self._config = storage_config
        self._weights = weights_of(self._stack.revision, _leaf)
        self._parallelism = parallelism(storage_config)
        if storage_config.is_mla_model and storage_config.tp_size > 1 and not self._is_shared():
            raise ConfigError(
                f"secondary: one of the {storage_config.tp_size} ranks stores the model's KV for all, so they need a "
                "tier that all reach: a bucket, a memory pool, or machine"
            )
        self.registered_pools: dict[str, Any] = {}
        self._pools: dict[str, PageMemory] = {}
        self._groups: dict[str, int] = {}
        self._exchange: BlockExchange | None = None
        self._changes = self._count_changes()
        self._threads = self._older_threads = frozenset[threading.Thread]()

    def _is_shared(self) -> bool:
        tiers = self._stack.secondary
        return self._stack.machine is not None or any(tier_definition(t.type).distance == "network" for t in tiers)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Add a host pool. If the stack is open already, it is closed and opened again with the further pool."""
        self.registered_pools[host_pool_name] = host_pool
        if self._exchange is not None:
            self._open()

    def on_host_pools_registered(self) -> None:
        """Open the stack, now that all pools and thus the sizes of pages are known.

        Raises:
            TieringError: a pool is of an unknown kind, the stack does not fit the pages, or there is too little memory.
        """
        self._open()

    def _open(self) -> None:
        self.close()
        found = {str(name): pool for name, pool in {PoolName.KV: self.mem_pool_host, **self.registered_pools}.items()}
        pools: dict[str, PageMemory] = {}
        for name, pool in sorted(found.items()):
            by_parts = self._by_parts or name != _KV
            memory = page_memory(name, pool, by_parts=by_parts, replicated=self._config.is_mla_model)
            if memory is not None:
                pools[name] = memory
        if not pools:
            raise ConfigError("SGLang registered no host pool with memory of its own")
        layout = {**self._parallelism, "pools": {name: pool.facts for name, pool in pools.items()}}
        model = model_identity(self._config.model_name, self._weights, layout, version, _leaf)
        sizes = [pool.nbytes for pool in pools.values()]
        manager = open_manager(self._stack, sizes, model, replica=replica_of(self._config))
        words = {"engine": "SGLang's host cache", "logger": logger, "deadline": self._deadline}
        exchange = started(BlockExchange, self._stack, manager, **words)
        self._pools, self._groups = pools, {name: number for number, name in enumerate(pools)}
        self._exchange = exchange

    def close(self) -> None:
        """Store what is queued within the stack's ``shutdown_deadline``, and release the memory."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.stop()

    def clear(self) -> bool:
        """Leave the epoch: no older page is served to this process again. Media are emptied in the background."""
        if self._exchange is not None:
            self._exchange.reset()
        return True

    def _count_changes(self) -> int:
        """Return how often SGLang has replaced the weights, as far as it records that."""
        return sum(not WEIGHTS.isdisjoint(fields) for _, fields in get_context().overrides_log())

    def _tiers(self) -> BlockExchange | None:
        """Return the tiers, which have left the epoch if the weights were replaced; None if they are not open.

        SGLang ends its storage threads when it flushes its caches. The threads that were alive before the weights were
        replaced may still have pages of the older weights, so their stores are refused.
        """
        older, changes, threads = self._threads, self._changes, frozenset(threading.enumerate())
        if (now := self._count_changes()) == changes:
            self._threads = threads
            return self._exchange
        logger.info("the weights were replaced: older pages are not served again, nor stored until SGLang's next flush")
        self._older_threads = older
        self.clear()
        self._changes = now  # last: a thread that finds it equal comes after the reset
        return self._exchange

    def _keys(self, pool: PageMemory, hashes: Sequence[str]) -> list[OffloadKey]:
        """Return the keys of pages; the rank is part of those that each rank has its own part of."""
        rank = f"cp {self._config.attn_cp_rank}" if pool.is_replicated else rank_of(self._config)
        group = self._groups[pool.name]
        return [
            make_offload_key(hashlib.sha256(json.dumps([pool.name, rank, name]).encode()).digest(), group)
            for name in hashes
        ]

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return _leading(self._held(_KV, keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move_parts(_KV, keys, host_indices, load=True) if self._by_parts else [False] * len(keys)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._move_parts(_KV, keys, host_indices, load=False) if self._by_parts else [False] * len(keys)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill whole pages, and return those that are held, with None for the others."""
        pages = target_locations or [None] * len(keys)
        done = self._move_whole(keys, pages, load=True)
        return [pages[n] if good else None for n, good in enumerate(done)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store whole pages, and return True if all are stored."""
        return all(self._move_whole(keys, values or [None] * len(keys), load=False))

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Return how many leading pages can be restored together with what the other pools need there."""
        due = self._due()
        pages = _leading(self._held(_KV, keys, due))
        hits: dict[Any, int] = {PoolName.KV: pages} if pages else {}
        restorable = list(range(1, pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                if covered := self._covered(transfer, due):
                    hits[transfer.name] = covered  # it gates nothing
                continue
            if not restorable:
                break
            lengths = self._lengths(transfer, keys[:pages], due)
            if lengths:
                hits[transfer.name] = lengths[-1]
            restorable = sorted(set(lengths).intersection(restorable))
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_all(transfers, load=True)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        return self._move_all(transfers, load=False)

    def _lengths(self, transfer: Any, keys: Sequence[str], due: float) -> list[int]:
        """Return the lengths of prefixes, in pages, for which a pool holds what it needs."""
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return list(range(1, _leading(self._held(transfer.name, keys, due)) + 1))
        window, run, lengths = max(1, len(transfer.keys or ())), 0, []
        for length, is_held in enumerate(self._held(transfer.name, keys, due, is_prefix=False), 1):
            run = run + 1 if is_held else 0
            if run >= min(window, length):
                lengths.append(length)
        return lengths

    def _covered(self, transfer: Any, due: float) -> int:
        """Return the number of pages that the leading complete groups of a pool cover."""
        keys, group = transfer.keys or (), transfer.group_pages
        if group < 1 or not keys:
            return 0
        return int(_leading(self._held(transfer.name, keys, due)) // group * transfer.block_pages)

    def _due(self) -> float:
        """Return the time by which a call that begins now ends."""
        return 0.0 if (exchange := self._exchange) is None else exchange.due()

    def _held(self, name: str, keys: Sequence[str], due: float | None = None, *, is_prefix: bool = True) -> list[bool]:
        exchange, pool = self._tiers(), self._pools.get(str(name))
        if exchange is None or pool is None:
            return self._without_memory(name, keys)
        return exchange.held(self._keys(pool, keys), is_prefix=is_prefix, due=due)

    def _move_all(self, transfers: Sequence[Any], *, load: bool) -> dict[str, list[bool]]:
        """Copy pages of several pools, all by one deadline."""
        due = self._due()
        return {
            each.name: self._move_parts(each.name, each.keys or (), each.host_indices, due, load=load)
            for each in transfers
        }

    def _move_parts(
        self, name: str, keys: Sequence[str], indices: Any, due: float | None = None, *, load: bool
    ) -> list[bool]:
        """Copy pages between a host pool and the tiers, and return which ones were copied."""
        return self._move(name, keys, lambda pool: pool.copies(indices, len(keys)), due, load=load)

    def _move_whole(self, keys: Sequence[str], pages: Sequence[Any], *, load: bool) -> list[bool]:
        """Copy whole pages of KV between tensors and the tiers, and return which ones were copied."""
        fits = not self._by_parts and len(pages) == len(keys)
        return self._move(_KV, keys, lambda pool: tensor_copies(pages, pool.nbytes) if fits else None, load=load)

    def _move(
        self,
        name: str,
        keys: Sequence[str],
        copies: Callable[[PageMemory], tuple[CopyBlock, CopyBlock] | None],
        due: float | None = None,
        *,
        load: bool,
    ) -> list[bool]:
        exchange, pool = self._tiers(), self._pools.get(str(name))
        if exchange is None or pool is None:
            return self._without_memory(name, keys)
        if (found := copies(pool)) is None:  # SGLang's indices or pages do not fit the pool
            return [False] * len(keys)
        read, write = found
        names = self._keys(pool, keys)
        if load:
            return exchange.load(names, read, due=due)
        changes = self._changes
        if threading.current_thread() in self._older_threads:
            return [False] * len(keys)
        stored = exchange.store(names, write, due=due)
        if self._count_changes() == changes:
            return stored
        self.clear()  # the weights were replaced meanwhile, and another thread may have left the epoch before the store
        return [False] * len(keys)

    def _without_memory(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Return the results for a pool without memory: only a logical pool of KV lacks nothing."""
        return [str(name) == _KV and self._exchange is not None and _KV not in self._pools] * len(keys)


def _leaf(name: str) -> Any:
    """Return one of SGLang's settings.

    Raises:
        ConfigError: this process has no settings, or this version does not have this one.
    """
    try:
        return get_context().config_leaf(name)
    except (ValueError, AttributeError) as error:
        raise ConfigError(
            f"{name}: SGLang {version} has no such setting here, and KV may depend on it: {error}"
        ) from error


def _leading(found: Sequence[bool]) -> int:
    """Return the number of leading hits."""
    return found.index(False) if False in found else len(found)
