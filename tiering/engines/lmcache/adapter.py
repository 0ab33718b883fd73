"""The class that LMCache loads: an L2 adapter that is a whole stack of this project.

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "tiering.engines.lmcache",
      "class_name": "KVTieringAdapter", "adapter_params": {"config": "stack.yaml"}}'

The stack's ``primary`` is memory of this project's own, through which all objects pass
(:mod:`tiering.engines.exchange`). An object is one block or several (:mod:`tiering.engines.lmcache.objects`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from lmcache import __version__ as version
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier
from numpy.typing import NDArray

from tiering.api.manager import OffloadingEvent
from tiering.api.namespace import ModelIdentity
from tiering.config.inline import read_adapter
from tiering.config.stack import open_manager
from tiering.engines.exchange import BlockExchange
from tiering.engines.lmcache.lanes import TaskLane
from tiering.engines.lmcache.objects import Buffer, Ledger, block_sizes, buffer_of, layout_of, parts_of
from tiering.engines.mailbox import JOIN_SECONDS, started
from tiering.engines.vllm.logging import share_logging
from tiering.manager.prompts import CopyBlock

logger = logging.getLogger("kv_tiering.lmcache")
share_logging(init_logger("lmcache.kv_tiering"))

_LOADERS = 4
"""Number of loads at the same time: one that a hung medium holds up does not delay the others."""

_SEARCHERS = 2
"""Number of lookups at the same time."""


class KVTieringAdapter(L2AdapterInterface):  # type: ignore[misc]
    """A stack of tiers behind LMCache's L1.

    Any thread may call all methods; none but :meth:`close` waits. A task ends by its deadline, counted from its
    submission; what is not there by then is a miss. Threads of the adapter copy, so nothing touches LMCache's memory
    once the task has ended.

    Args:
        config: the ``adapter_params`` of the dictionary.
        l1_memory_desc: LMCache's description of its L1; not used.

    Raises:
        TieringError: the dictionary is invalid, or the stack cannot be opened.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        stack, deadline, block_bytes = read_adapter(config)
        super().__init__(max((getattr(tier, "capacity", None) or 0 for tier in stack.secondary), default=0))
        self._sizes = block_sizes(block_bytes)
        self._ledger = Ledger()
        self._counts = {"stored": 0, "not_stored": 0, "loaded": 0, "missed": 0}
        self._patience = stack.shutdown_deadline + JOIN_SECONDS
        self._stores: TaskLane[Any] = TaskLane("store", 1, create_event_notifier())
        self._lookups: TaskLane[Any] = TaskLane("lookup", _SEARCHERS, create_event_notifier())
        self._loads: TaskLane[Any] = TaskLane("load", _LOADERS, create_event_notifier())
        self._lanes = (self._stores, self._lookups, self._loads)
        self._exchange: BlockExchange | None = None
        try:
            layout = json.dumps({"blocks": self._sizes})
            model = ModelIdentity("lmcache", str(stack.revision), "in keys", layout, {"engine": f"lmcache {version}"})
            manager = open_manager(stack, self._sizes, model, enable_events=True)
            words = {"engine": "LMCache", "logger": logger, "deadline": deadline, "on_events": self._on_events}
            self._exchange = started(BlockExchange, stack, manager, **words)
            for lane in self._lanes:
                lane.start()
        except BaseException:
            self.close()
            raise

    def get_store_event_fd(self) -> int:
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        return self._loads.descriptor

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        work = partial(self._store, list(keys), list(objects), self._due())
        return self._stores.submit(work, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        return dict(self._stores.take_all())

    def _store(self, keys: Sequence[Any], objects: Sequence[Any], due: float) -> Any:
        buffers = list(self._buffers(keys, objects))
        done = [buffer for run in self._runs(buffers) for buffer in self._move(run, due, load=False)]
        new: list[tuple[Any, int]] = []
        for buffer in done:
            is_new, replaced = self._ledger.add(buffer.key, buffer.layout, [part.key for part in buffer.parts])
            if replaced:
                self._notify(self._notify_keys_deleted, [(buffer.key, replaced)])
            if is_new:
                new.append((buffer.key, buffer.layout.nbytes))
        self._notify(self._notify_keys_stored, new)
        self._counts["stored"] += len(done)
        self._counts["not_stored"] += len(keys) - len(done)
        return L2StoreResult(len(done) == len(keys), sum(buffer.layout.nbytes for buffer in done))

    def _runs(self, buffers: Sequence[Buffer]) -> Iterator[Sequence[Buffer]]:
        """Yield runs of objects that need as many rows as are lent at once.

        Each run has time of its own to find room.
        """
        run: list[Buffer] = []
        rows, largest = 0, 1 if self._exchange is None else self._exchange.part
        for buffer in buffers:
            if run and rows + len(buffer.parts) > largest:
                yield run
                run, rows = [], 0
            run.append(buffer)
            rows += len(buffer.parts)
        if run:
            yield run

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        work = partial(self._look_up, list(keys), dict(group_layout_descs), self._due())
        return self._lookups.submit(work, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Do nothing: a lookup locks nothing, and an object that is evicted before its load is a miss."""

    def _look_up(self, keys: Sequence[Any], descs: Mapping[int, Any], due: float) -> Any:
        layouts = {group: layout_of(desc.shapes, desc.dtypes) for group, desc in descs.items()}
        found = Bitmap(len(keys))
        wanted: list[list[bytes]] = []
        for key in keys:
            layout = layouts.get(key.object_group_id) or self._ledger.layout(key)
            known = layout is not None and not self._ledger.is_deleted(key)
            wanted.append([part.key for part in parts_of(key, layout, self._sizes)] if layout and known else [])
        blocks = list(dict.fromkeys(chain.from_iterable(wanted)))
        if self._exchange is None or not blocks:
            return found
        results = self._exchange.held(blocks, is_prefix=False, due=due)
        held = {key for key, good in zip(blocks, results, strict=True) if good}
        for position, parts in enumerate(wanted):
            if parts and held.issuperset(parts):
                found.set(position)
        return found

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        work = partial(self._load, list(keys), list(objects), self._due())
        return self._loads.submit(work, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        return self._loads.take(task_id)

    def _load(self, keys: Sequence[Any], objects: Sequence[Any], due: float) -> Any:
        buffers = [each for each in self._buffers(keys, objects) if not self._ledger.is_deleted(each.key)]
        done = self._move(buffers, due, load=True)
        found = Bitmap(len(keys))
        for buffer in done:
            found.set(buffer.position)
        if done:
            self._notify(lambda loaded, _: self._notify_keys_accessed(loaded), [(buffer.key, 0) for buffer in done])
        self._counts["loaded"] += len(done)
        self._counts["missed"] += len(keys) - len(done)
        return found

    def delete(self, keys: Sequence[Any]) -> None:
        """Hide objects from this process until they are stored again.

        The stack evicts their bytes in its own order.
        """
        self._notify(self._notify_keys_deleted, self._ledger.delete(keys))

    def _on_events(self, events: Sequence[OffloadingEvent]) -> None:
        """Follow the tiers; LMCache's listeners are called on another thread than the manager's."""
        if gone := self._ledger.note(events):
            self._stores.post(partial(self._notify, self._notify_keys_deleted, gone))

    def _notify(self, method: Callable[[list[Any], list[int]], None], objects: Sequence[tuple[Any, int]]) -> None:
        """Call LMCache's listeners, whose failures are not those of a task."""
        if not objects:
            return
        try:
            method([key for key, _ in objects], [nbytes for _, nbytes in objects])
        except Exception:
            logger.exception("a listener of LMCache failed")

    def report_status(self) -> dict[str, Any]:
        """Return whether the tiers are in service, and what the tasks did."""
        exchange = self._exchange
        return {
            "is_healthy": exchange is not None and not exchange.failed,
            "type": type(self).__name__,
            "objects": len(self._ledger),
            "late_calls": 0 if exchange is None else exchange.timeouts,
            **self._counts,
        }

    def close(self) -> None:
        """Store what is queued within the stack's ``shutdown_deadline``, and release the memory."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.stop()
        for lane in self._lanes:
            lane.close(self._patience)

    def _due(self) -> float:
        """Return the time by which a task that is submitted now ends."""
        return 0.0 if (exchange := self._exchange) is None else exchange.due()

    def _buffers(self, keys: Sequence[Any], objects: Sequence[Any]) -> Iterator[Buffer]:
        """Yield the objects of a task that can be copied, each key once."""
        seen = set()
        for position, (key, memory) in enumerate(zip(keys, objects, strict=True)):
            if key in seen:
                continue
            seen.add(key)
            try:
                buffer = buffer_of(position, key, memory, self._sizes)
            except (NotImplementedError, AttributeError, TypeError, ValueError) as error:
                logger.warning("an object of LMCache is not in CPU memory, or of an unknown kind: %s", error)
                continue
            if buffer is not None:
                yield buffer

    def _move(self, buffers: Sequence[Buffer], due: float, *, load: bool) -> list[Buffer]:
        """Copy objects between LMCache's memory and the tiers, and return those that were copied whole."""
        exchange = self._exchange
        if exchange is None or not buffers:
            return []
        keys = [part.key for buffer in buffers for part in buffer.parts]
        read, write = _copies([piece for buffer in buffers for piece in buffer.pieces()])
        results = exchange.load(keys, read, is_prefix=False, due=due) if load else exchange.store(keys, write, due=due)
        done = {key for key, good in zip(keys, results, strict=True) if good}
        return [buffer for buffer in buffers if done.issuperset(part.key for part in buffer.parts)]


def _copies(contents: Sequence[NDArray[np.uint8]]) -> tuple[CopyBlock, CopyBlock]:
    """Return the functions that copy blocks from, and to, rows."""

    def read(position: int, row: NDArray[np.uint8]) -> None:
        np.copyto(contents[position], row[: len(contents[position])])

    def write(position: int, row: NDArray[np.uint8]) -> None:
        np.copyto(row[: len(contents[position])], contents[position])

    return read, write
