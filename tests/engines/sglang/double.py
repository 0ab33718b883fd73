"""A stand-in for SGLang's HiCache, by the signatures of version 0.5.23.

A test in ``tests/sglang`` compares the signatures with the installed package. Modules of the names that the backend
imports are made from it, so that the real class runs without SGLang.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tests.stand_ins import module, standing_in

VERSION = "0.5.23"

METHODS: dict[str, tuple[str, ...]] = {
    "register_mem_pool_host": ("mem_pool_host",),
    "register_mem_host_pool_v2": ("host_pool", "host_pool_name"),
    "on_host_pools_registered": (),
    "batch_exists_v2": ("keys", "pool_transfers", "extra_info"),
    "batch_get_v2": ("transfers", "extra_info"),
    "batch_set_v2": ("transfers", "extra_info"),
    "batch_get_v1": ("keys", "host_indices", "extra_info"),
    "batch_set_v1": ("keys", "host_indices", "extra_info"),
    "get": ("key", "target_location", "target_sizes"),
    "batch_get": ("keys", "target_locations", "target_sizes"),
    "set": ("key", "value", "target_location", "target_sizes"),
    "batch_set": ("keys", "values", "target_locations", "target_sizes"),
    "exists": ("key",),
    "batch_exists": ("keys", "extra_info"),
    "clear": (),
    "get_stats": (),
}
"""Method of a storage backend → names of its parameters."""

CONFIG = (
    *("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "is_mla_model"),
    *("enable_storage_metrics", "is_page_first_layout", "model_name", "tp_lcm_size", "should_split_heads"),
    *("dp_rank", "extra_config", "dcp_size", "dcp_rank", "logical_page_size"),
)
"""Fields of SGLang's configuration of a storage backend."""

LEAVES: dict[str, Any] = {
    "revision": None,
    "enable_lora": None,
    "lora_paths": None,
    "quantization_param_path": None,
    "random_seed": 7,
    "load_format": "auto",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "model_path": "org/model",
}
"""Settings of the stand-in; all others of the identity are None."""


class PoolName(enum.StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    SWA = "swa"
    INDEXER = "indexer"
    DRAFT = "draft"


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    nodes_to_load: list[Any] | None = None
    indices_from_pool: PoolName | None = None
    block_pages: int = 0
    group_pages: int = 0


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def get_stats(self) -> Any:
        return None


@dataclass
class Context:
    """SGLang's settings in one process, and the log of the changes that it made to them."""

    leaves: dict[str, Any] = field(default_factory=dict)
    log: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def config_leaf(self, name: str) -> Any:
        if name == "missing":
            raise ValueError("not a config leaf")
        return {**LEAVES, **self.leaves}.get(name)

    def overrides_log(self) -> list[tuple[str, dict[str, Any]]]:
        return list(self.log)


def config_of(extra: dict[str, Any], **changed: Any) -> Any:
    """Return SGLang's configuration of a storage backend for one process."""
    words = dict.fromkeys(CONFIG) | {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "model_name": "org/model",
        "dp_rank": 0,
        "dcp_size": 1,
        "dcp_rank": 0,
    }
    return SimpleNamespace(**{**words, "extra_config": extra, **changed})


class MHATokenToKVPoolHost:
    """A host pool of keys and values: a page is two parts, or two for each layer."""

    layers, heads, width = 3, 2, 64

    def __init__(self, layout: str = "page_first", pages: int = 64, page_size: int = 4, dtype: Any = torch.bfloat16):
        self.layout, self.page_size, self.dtype = layout, page_size, dtype
        self.layer_num, self.head_num, self.head_dim, self.size = self.layers, self.heads, self.width, pages * page_size
        self.start_layer, self.end_layer = 0, self.layers
        outer = (self.size, self.layers) if layout == "page_first" else (self.layers, self.size)
        generator = torch.Generator().manual_seed(0)
        self.kv_buffer = torch.randn((2, *outer, self.heads, self.width), generator=generator).to(dtype)

    def indices(self, *pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(n * self.page_size, (n + 1) * self.page_size) for n in pages])

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        span = slice(index, index + self.page_size)
        page = self.kv_buffer[:, span] if self.layout == "page_first" else self.kv_buffer[:, :, span]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * self.layers * self.page_size * self.heads * self.width, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        token = self.heads * self.width * self.dtype.itemsize
        half, base, places = self.layers * self.size * token, self.kv_buffer.data_ptr(), []
        firsts = indices.tolist()[:: self.page_size]
        if self.layout == "page_first":
            for index in firsts:
                places += [base + index * self.layers * token, base + half + index * self.layers * token]
            return places, [self.layers * self.page_size * token] * len(places)
        for index in firsts:
            for layer in range(self.layers):
                place = base + (layer * self.size + index) * token
                places += [place, place + half]
        return places, [self.page_size * token] * len(places)


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """A host pool with the same bytes on all tensor-parallel ranks."""


class MambaPoolHost(MHATokenToKVPoolHost):
    """A host pool of states, which has no parts of pages."""

    def __init__(self, pages: int = 64) -> None:
        super().__init__(pages=pages, page_size=1, dtype=torch.float32)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise NotImplementedError("side states")


class LogicalHostPool:
    """A host pool of KV without memory."""

    kv_buffer = None
    size_per_token = 0
    page_size = 4


class PageInterleaveHostPool(MHATokenToKVPoolHost):
    """A host pool whose pages belong to several ranks."""


@contextmanager
def installed(context: Context) -> Iterator[Any]:
    """Install the stand-in, and yield its function that loads a dynamic backend."""
    names = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
    storage = {"HiCacheStorage": HiCacheStorage, "PoolHitPolicy": PoolHitPolicy, "PoolName": PoolName}
    modules = [
        *map(module, names),
        module("sglang.version", __version__=VERSION),
        module("sglang.srt.runtime_context", get_context=lambda: context),
        module("sglang.srt.mem_cache.hicache_storage", PoolTransferResult=PoolTransferResult, **storage),
    ]

    def create(config: Any) -> Any:
        given = config.extra_config
        kind = getattr(importlib.import_module(given["module_path"]), given["class_name"])
        if not issubclass(kind, HiCacheStorage):
            raise TypeError("no storage backend")
        return kind(config, {})

    with standing_in(modules, "tiering.engines.sglang.backend"):
        yield create
