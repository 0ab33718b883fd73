"""The reset of the connector when new weights were written into a running engine.

vLLM writes weights when a method of its workers is called, and empties no cache then. Whoever calls must do that. But
vLLM's reset of its own cache leaves a connector's blocks alone unless it is asked to, and requests may run before it.
The connector therefore resets itself after each call that may have written weights: if the name of the method says so,
or if a worker's model has loaded weights meanwhile. What is written without a call is noticed when vLLM empties its own
cache. Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("kv_tiering.vllm")

_WRITES = re.compile(r"(?!(init|shutdown|get|check|compute|list|save|report)_)\w*(weight|param)")
"""Names of methods of workers that may write weights: vLLM's own, and usual ones of trainers."""
_METHOD, _LOADS = "load_weights", "kv_tiering_loads"


def count_loads(model: Any) -> None:
    """Let a model count the calls of its ``load_weights`` from now on, as far as it has the method."""
    owner = next((kind for kind in type(model).__mro__ if _METHOD in vars(kind)), None)
    if owner is None:
        return
    vars(model)[_LOADS] = 0  # the first load counted if another engine of this process has a model of the class
    if hasattr(vars(owner)[_METHOD], "kv_tiering"):
        return
    load = vars(owner)[_METHOD]

    @functools.wraps(load)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)[_LOADS] = vars(self).get(_LOADS, 0) + 1
        return load(self, *args, **kwargs)

    load_weights.kv_tiering = True  # type: ignore[attr-defined]
    setattr(owner, _METHOD, load_weights)


def loads_of(worker: Any) -> int:
    """Return how often the model of vLLM's ``worker`` has loaded weights since :func:`count_loads`."""
    return int(getattr(worker.model_runner.get_model(), _LOADS, 0))


class WeightWatch:
    """The watch over the weights of one engine.

    Args:
        core: vLLM's object that calls the workers; None: it is not found, and nothing is watched.
        reset: resets the connector.
    """

    def __init__(self, core: Any, reset: Callable[[], object]) -> None:
        self._core = core
        self._reset = reset
        self._loads = 0
        """Number of loads on all workers when they were asked last."""
        if core is None:
            logger.warning("vLLM's core is not found: reset all caches before requests, once new weights were loaded")
            return
        call = core.collective_rpc

        @functools.wraps(call)  # vLLM converts a client's arguments by the signature
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(method, *args, **kwargs)
            finally:
                self.check(named=isinstance(method, str) and _WRITES.match(method) is not None)

        core.collective_rpc = collective_rpc

    def bind(self, cache_manager: Any) -> None:
        """Check the weights whenever vLLM empties its prefix cache.

        Args:
            cache_manager: vLLM's manager of the KV cache. Its ``reset_prefix_cache`` is replaced.
        """
        reset = cache_manager.reset_prefix_cache

        def reset_prefix_cache() -> Any:
            self.check()
            return reset()

        cache_manager.reset_prefix_cache = reset_prefix_cache

    def check(self, *, named: bool = False) -> None:
        """Reset the connector if weights were written.

        Args:
            named: True if a method was called that writes weights by its name; default: False.
        """
        if self._core is None:
            return
        before = self._loads
        try:
            self._loads = sum(self._core.model_executor.collective_rpc(loads_of))
        except Exception as error:  # of any kind: the workers are foreign code, or gone
            logger.debug("the workers do not say whether they have loaded weights", exc_info=error)
            named = True
        if named or self._loads != before:
            logger.info("new weights: no block that was computed before is served any more")
            self._reset()
