"""The end of waits for loads when vLLM empties its own prefix cache.

vLLM empties that cache only if no block is in use. A reset with ``reset_running_requests`` takes the blocks of running
requests back, but not those of requests that wait for a connector's load. vLLM then raises a RuntimeError. It asks no
connector before, so the connector puts itself in front of the cache manager's ``reset_prefix_cache``.

With asynchronous scheduling, vLLM itself keeps the blocks that a step in flight computes when their request gives them
up, beside every connector that loads. A reset with ``reset_running_requests`` still raises the error during the step.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Any

from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.simple.scheduler import SimpleCPUOffloadScheduler


class LoadWaits:
    """The requests that hold GPU blocks for loads of this connector, and do not run.

    The requests of other connectors are not among them, nor are their blocks.
    """

    def __init__(self) -> None:
        self._loading: dict[str, Any] = {}
        """Requests whose load vLLM has not seen end. vLLM frees the blocks of such a request only afterwards."""
        self._loaded: dict[str, Any] = {}
        """Requests whose load has ended, and that vLLM has not scheduled since."""

    def bind(self, cache_manager: Any, half: OffloadingConnectorScheduler | SimpleCPUOffloadScheduler) -> None:
        """End all waits whenever vLLM empties its prefix cache and only they prevent that.

        Args:
            cache_manager: vLLM's manager of the KV cache. Its ``reset_prefix_cache`` is replaced.
            half: the scheduler half.
        """
        reset = cache_manager.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self._end(cache_manager, half)
            return bool(reset())

        cache_manager.reset_prefix_cache = reset_prefix_cache

    def allocated(self, request: Any, external_tokens: int) -> None:
        """Record that a request has got its blocks: for a load, or, without external tokens, to run."""
        self._loaded.pop(request.request_id, None)
        if external_tokens:
            self._loading[request.request_id] = request

    def received(self, request_ids: Collection[str]) -> None:
        """Record that vLLM learns now of the ends of these requests' loads."""
        for request_id in request_ids:
            request = self._loading.pop(request_id, None)
            if request is not None and not request.is_finished():
                self._loaded[request_id] = request

    def finished(self, request_id: str) -> None:
        """Record that a request has ended. vLLM keeps its blocks if its load is under way."""
        self._loaded.pop(request_id, None)

    def _end(self, cache_manager: Any, half: OffloadingConnectorScheduler | SimpleCPUOffloadScheduler) -> None:
        """Give back the blocks of all waiting requests and copies, unless other blocks are in use as well.

        A request that waited starts over and computes its whole prompt. vLLM still counts the blocks of its first load
        as reserved, so another load of the same request might wait for itself.
        """
        pool, waiting = cache_manager.block_pool, [*self._loading.values(), *self._loaded.values()]
        tables = chain.from_iterable(cache_manager.get_block_ids(request.request_id) for request in waiting)
        blocks = {*chain.from_iterable(tables), *half.copied_blocks()} - {pool.null_block.block_id}
        in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        if not blocks or in_use > len(blocks):
            return
        half.give_up_blocks(request.request_id for request in waiting)
        for request in waiting:
            if not request.is_finished():
                request.num_computed_tokens = 0
            cache_manager.free(request)
