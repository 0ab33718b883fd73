"""A stand-in for LMCache's multiprocess server, by the signatures of version 0.5.6.

A test in ``tests/lmcache`` compares the signatures with the installed package. Modules of the names that the adapter
imports are made from it, so that the real class runs without LMCache.
"""

from __future__ import annotations

import importlib
import logging
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.stand_ins import module, standing_in

VERSION = "0.5.6"

METHODS: dict[str, tuple[str, ...]] = {
    "get_store_event_fd": (),
    "get_lookup_and_lock_event_fd": (),
    "get_load_event_fd": (),
    "submit_store_task": ("keys", "objects"),
    "pop_completed_store_tasks": (),
    "submit_lookup_and_lock_task": ("keys", "group_layout_descs"),
    "query_lookup_and_lock_result": ("task_id",),
    "submit_unlock": ("keys",),
    "submit_load_task": ("keys", "objects"),
    "query_load_result": ("task_id",),
    "delete": ("keys",),
    "close": (),
    "report_status": (),
}
"""Method of an L2 adapter → names of its parameters."""

OPTIONAL = frozenset({"delete", "report_status"})
"""Methods that LMCache implements itself unless an adapter does."""

NOTICES: dict[str, tuple[str, ...]] = {
    "_notify_keys_stored": ("keys", "sizes"),
    "_notify_keys_accessed": ("keys",),
    "_notify_keys_deleted": ("keys", "sizes"),
}
"""Method by which an adapter notifies LMCache's listeners → names of its parameters."""


@dataclass(frozen=True)
class ObjectKey:
    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class MemoryLayoutDesc:
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]


@dataclass
class Metadata:
    shape: torch.Size
    dtype: torch.dtype | None
    shapes: list[torch.Size] | None = None
    dtypes: list[torch.dtype] | None = None


class TensorMemoryObj:
    """An object in CPU memory, possibly with padding behind its bytes."""

    def __init__(self, content: torch.Tensor) -> None:
        self.metadata = Metadata(content.shape, content.dtype, [content.shape], [content.dtype])
        self.raw_data = content.view(-1).view(torch.uint8)

    @property
    def byte_array(self) -> memoryview:
        return memoryview(self.raw_data.numpy())  # type: ignore[arg-type]


class GDSMemoryObject(TensorMemoryObj):
    """An object that is not in CPU memory."""

    @property
    def byte_array(self) -> memoryview:
        raise NotImplementedError("staged in VRAM")


class Bitmap:
    def __init__(self, size: int) -> None:
        self.bits = [False] * size

    def set(self, index: int) -> None:
        self.bits[index] = True

    def test(self, index: int) -> bool:
        return self.bits[index]


class L2StoreResult(int):
    def __new__(cls, success: bool, bytes_transferred: int) -> L2StoreResult:
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        return int(self) >= 0


class Notifier:
    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def notify(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass
class Listener:
    """The notices of an adapter."""

    stored: list[tuple[ObjectKey, int]] = field(default_factory=list)
    accessed: list[ObjectKey] = field(default_factory=list)
    deleted: list[ObjectKey] = field(default_factory=list)


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.max_capacity_bytes, self.used, self.listener = max_capacity_bytes, 0, Listener()

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.used += sum(sizes)
        self.listener.stored.extend(zip(keys, sizes, strict=True))

    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.listener.accessed.extend(keys)

    def _notify_keys_deleted(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.used -= sum(sizes)
        self.listener.deleted.extend(keys)


class Controller:
    """LMCache's controllers: they submit a task, poll its descriptor, and take its result."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter

    def _wait(self, descriptor: int) -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(30_000):
            raise TimeoutError("a task did not end")
        os.eventfd_read(descriptor)

    def store(self, objects: Mapping[ObjectKey, Any]) -> bool:
        number = self.adapter.submit_store_task(list(objects), list(objects.values()))
        results: dict[int, Any] = {}
        while number not in results:
            self._wait(self.adapter.get_store_event_fd())
            results.update(self.adapter.pop_completed_store_tasks())
        return bool(results[number].is_successful())

    def look_up(self, keys: Sequence[ObjectKey], descs: Mapping[int, MemoryLayoutDesc]) -> list[bool]:
        number = self.adapter.submit_lookup_and_lock_task(list(keys), descs)
        while (found := self.adapter.query_lookup_and_lock_result(number)) is None:
            self._wait(self.adapter.get_lookup_and_lock_event_fd())
        self.adapter.submit_unlock(list(keys))
        return [found.test(index) for index in range(len(keys))]

    def load(self, objects: Mapping[ObjectKey, Any]) -> list[bool]:
        number = self.adapter.submit_load_task(list(objects), list(objects.values()))
        while (found := self.adapter.query_load_result(number)) is None:
            self._wait(self.adapter.get_load_event_fd())
        return [found.test(index) for index in range(len(objects))]


@contextmanager
def installed(version: str = VERSION) -> Iterator[Any]:
    """Install the stand-in, and yield its function that loads an adapter of the type ``plugin``."""
    distributed = "lmcache.v1.distributed"
    modules = [
        module("lmcache", __version__=version),
        module("lmcache.logging", init_logger=logging.getLogger),
        module("lmcache.lmcache_native", Bitmap=Bitmap),
        module("lmcache.v1"),
        module("lmcache.v1.platform", create_event_notifier=Notifier),
        module(distributed),
        module(f"{distributed}.internal_api", L2StoreResult=L2StoreResult),
        module(f"{distributed}.l2_adapters"),
        module(f"{distributed}.l2_adapters.base", L2AdapterInterface=L2AdapterInterface),
    ]

    def create(config: Mapping[str, Any]) -> Any:
        kind = getattr(importlib.import_module(config["module_path"]), config["class_name"])
        if not issubclass(kind, L2AdapterInterface):
            raise TypeError("no L2 adapter")
        return kind(config["adapter_params"], l1_memory_desc=object())

    with standing_in(modules, "tiering.engines.lmcache.adapter"):
        yield create
