"""The reset of the connector when new weights were written into a running engine.

vLLM writes weights when a method of its workers is called, and empties no cache then. Whoever calls must do that. But
vLLM's reset of its own cache leaves a connector's blocks alone unless it is asked to, and requests may run before it.
The connector therefore resets itself after each call that may have written weights: if the name of the method says so,
if a worker's model has loaded weights meanwhile, or if a function of the caller's has changed parameters. What is
loaded without a call is noticed when vLLM empties its own cache. Nothing here imports vLLM; its objects are read by
attribute.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("kv_tiering.vllm")

_WRITES = re.compile(r"(?!(init|shutdown|get|check|compute|list|save|report)_)\w*(weight|param)")
"""Names of methods of workers that may write weights: vLLM's own, and usual ones of trainers."""
_METHOD, _LOADS = "load_weights", "kv_tiering_loads"
_SAMPLE = 1024
"""Most values of each parameter that are compared before and after a function of the caller's."""


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


def _values(worker: Any) -> dict[tuple[str, int], Any] | None:
    """Return some values of each parameter, as integers by device and size; None: they cannot be read.

    Those of an engine that may sleep are not read: while it does, an access to its memory ends the process.
    """
    import torch

    if getattr(worker.vllm_config.model_config, "enable_sleep_mode", False):
        return None
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found: dict[tuple[str, int], list[Any]] = {}
    for each in worker.model_runner.get_model().parameters():
        count, size = each.numel(), each.element_size()
        if count and not each.is_meta:
            step = -(-count // _SAMPLE)
            some = each.detach().as_strided((-(-count // step),), (step,), each.storage_offset()).view(kinds[size])
            found.setdefault((str(each.device), size), []).append(some)
    return {kind: torch.cat(values).cpu() for kind, values in found.items()}


def watched(method: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``method`` with ``worker``, and count a load of its model if parameters changed.

    Args:
        method: a function, or the name of a method of the worker.
        worker: vLLM's worker.
        args: the other arguments.
        kwargs: the other arguments by name.
    """
    before = after = None
    with contextlib.suppress(Exception):
        before = _values(worker)
    try:
        return getattr(worker, method)(*args, **kwargs) if isinstance(method, str) else method(worker, *args, **kwargs)
    finally:
        with contextlib.suppress(Exception):
            after = None if before is None else _values(worker)
        with contextlib.suppress(Exception):  # there is no model: the workers cannot say how often it has loaded
            if before is None or after is None or not _are_equal(before, after):
                own = vars(worker.model_runner.get_model())
                own[_LOADS] = own.get(_LOADS, 0) + 1


def _are_equal(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(values.equal(after[kind]) for kind, values in before.items())


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
            named, ask = isinstance(method, str) and _WRITES.match(method) is not None, True
            if callable(method) or method == "apply_model":
                method = functools.partial(watched, method)
            try:
                return call(method, *args, **kwargs)
            except TimeoutError:  # a worker is still at it: the next answer is this call's, whenever it comes
                named, ask = True, False
                raise
            finally:
                self.check(named=named, ask=ask)

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

    def check(self, *, named: bool = False, ask: bool = True) -> None:
        """Reset the connector if weights were written.

        Args:
            named: True if a method was called that writes weights by its name; default: False.
            ask: True (default): ask the workers, too.
        """
        if self._core is None:
            return
        before = self._loads
        if ask:
            try:
                self._loads = sum(self._core.model_executor.collective_rpc(loads_of))
            except Exception as error:  # of any kind: the workers are foreign code, or gone
                logger.debug("the workers do not say whether they have loaded weights", exc_info=error)
                named = True
        if named or self._loads != before:
            logger.info("new weights: no block that was computed before is served any more")
            self._reset()
