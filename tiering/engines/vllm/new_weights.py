"""The reset of the connector when new weights were written into a running engine.

vLLM writes weights when a method of its workers is called, and empties no cache then. Whoever calls must do that. But
vLLM's reset of its own cache leaves a connector's blocks alone unless it is asked to, and requests may run before it.
The connector is therefore reset after each call that may have written weights: if the name of the method says so, if a
worker's model has loaded weights meanwhile, or if a function or method that is not vLLM's has changed parameters. What
is loaded without a call is noticed when vLLM empties its own cache. Nothing here imports vLLM; its objects are read by
attribute.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import re
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("kv_tiering.vllm")

_WRITES = re.compile(r"(?!(init|shutdown|get|check|compute|list|save|report)_)\w*(weight|param)")
"""Names of methods of workers that may write weights: vLLM's own, and usual ones of trainers."""
_METHOD, _LOADS, _APPLY = "load_weights", "kv_tiering_loads", "apply_model"
_PATIENCE = ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "300")
"""Name and default of vLLM's variable with the most seconds of a step."""
_PARTS = 1024
"""Most parts of each parameter whose sums are compared before and after foreign code."""


def loads_of(worker: Any) -> int:
    """Return a number that differs after a load of the weights of ``worker``, and for another model."""
    model = worker.model_runner.get_model()
    if _LOADS not in vars(model):
        _count_loads(model)
    return int(vars(model)[_LOADS])


def _count_loads(model: Any) -> None:
    """Let a model count the calls of its ``load_weights`` from now on, as far as it has the method."""
    _count(model)
    owner = next((kind for kind in type(model).__mro__ if _METHOD in vars(kind)), None)
    if owner is None or hasattr(vars(owner)[_METHOD], "kv_tiering"):
        return
    load = vars(owner)[_METHOD]

    @functools.wraps(load)
    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        _count(self)
        return load(self, *args, **kwargs)

    load_weights.kv_tiering = True  # type: ignore[attr-defined]
    setattr(owner, _METHOD, load_weights)


def _count(model: Any) -> None:
    """Count a load; the number of the first one is random, so that another model has another number."""
    vars(model)[_LOADS] = vars(model).get(_LOADS, random.getrandbits(48)) + 1


def _values(worker: Any) -> dict[str, Any] | None:
    """Return sums over all parameters and buffers, as integers by device; None: they cannot be read.

    Those of an engine that may sleep are not read: while it does, an access to its memory ends the process.
    """
    import torch

    if getattr(worker.vllm_config.model_config, "enable_sleep_mode", False):
        return None
    model = worker.model_runner.get_model()
    found: dict[str, list[Any]] = {}
    for each in (*model.parameters(), *model.buffers()):
        if each.numel() and not each.is_meta:
            found.setdefault(str(each.device), []).extend(_sums(each.detach()))
    return {device: torch.cat(sums).cpu() for device, sums in found.items()}


def _sums(tensor: Any) -> list[Any]:
    """Return the sums of the parts of a tensor's memory, read as integers that are as long as possible."""
    import torch

    count, size = tensor.numel(), tensor.element_size()
    if sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1 != count:
        tensor = tensor.contiguous()  # memory with gaps or repetitions
    values = tensor.as_strided((count,), (1,), tensor.storage_offset())
    is_whole = values.data_ptr() % 8 == values.storage_offset() * size % 8 == count * size % 8 == 0
    values = values.view(torch.int64 if is_whole else {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size])
    parts = min(_PARTS, len(values))
    even = len(values) // parts * parts
    sums = values[:even].view(parts, -1).sum(1, dtype=torch.int64)
    return [sums, values[even:].sum(dtype=torch.int64).view(1)]


def watched(method: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``method`` with ``worker``, and count a load if foreign code changed parameters or buffers.

    Args:
        method: a function, or the name of a method of the worker.
        worker: vLLM's worker.
        args: the other arguments.
        kwargs: the other arguments by name.
    """
    call = getattr(worker, method) if isinstance(method, str) else functools.partial(method, worker)
    if method != _APPLY and str(getattr(call, "__module__", None)).startswith("vllm."):
        return call(*args, **kwargs)
    before = after = None
    with contextlib.suppress(Exception):
        before = _values(worker)
    try:
        return call(*args, **kwargs)
    finally:
        with contextlib.suppress(Exception):
            after = None if before is None else _values(worker)
        with contextlib.suppress(Exception):  # there is no model: the workers cannot say how often it has loaded
            if before is None or after is None or not _are_equal(before, after):
                _count(worker.model_runner.get_model())


def _are_equal(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    return before.keys() == after.keys() and all(values.equal(after[kind]) for kind, values in before.items())


class WeightWatch:
    """The watch over the weights of one engine.

    Args:
        core: vLLM's object that calls the workers; None: it is not found, and nothing is watched.
        reset: resets the connector.
        twice: True: reset the connector once more when vLLM's own cache has been emptied after new weights, because
            the connector has stored again what it found there; default: False.
    """

    def __init__(self, core: Any, reset: Callable[[], object], *, twice: bool = False) -> None:
        self._core = core
        self._reset = reset
        self._twice = twice
        self._loads: list[int] | None = None
        """The workers' answers (:func:`loads_of`) when they were asked last; None: they do not say."""
        self._is_late = False
        """True once a worker has not answered in time: the next answer is to that call, whenever it comes."""
        self._is_stale = False
        """True if vLLM's own cache may have KV of earlier weights."""
        if core is None:
            logger.warning("vLLM's core is not found: reset all caches before requests, once new weights were loaded")
            return
        self._ask()
        call, reset_own = core.collective_rpc, core.reset_prefix_cache

        @functools.wraps(call)  # vLLM converts a client's arguments by the signature
        def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            named = isinstance(method, str) and _WRITES.match(method) is not None
            if not named and getattr(method, "func", None) is not watched:  # else another connector watches the call
                method = functools.partial(watched, method)
            try:
                return call(method, *args, **kwargs)
            except TimeoutError:
                self._is_late = True
                raise
            finally:
                self.check(named=named)

        @functools.wraps(reset_own)
        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            self.check()
            is_empty = reset_own(*args, **kwargs)
            if is_empty and self._is_stale:
                self._is_stale = False
                if self._twice:
                    self._reset()
            return is_empty

        core.collective_rpc, core.reset_prefix_cache = collective_rpc, reset_prefix_cache

    def check(self, *, named: bool = False) -> None:
        """Reset the connector if weights were written.

        Args:
            named: True if a method was called that writes weights by its name; default: False.
        """
        before = self._loads
        self._ask()
        if named or self._loads is None or self._loads != before:
            logger.info("new weights: no block that was computed before is served any more")
            self._is_stale = True
            self._reset()

    def _ask(self) -> None:
        """Ask the workers for the state of their weights."""
        self._loads = None
        if self._is_late:
            return
        try:
            self._loads = self._core.model_executor.collective_rpc(loads_of, timeout=float(os.environ.get(*_PATIENCE)))
        except TimeoutError:
            self._is_late = True
            logger.warning(
                "a worker does not answer: blocks that were computed before are not served any more, nor after any "
                "later reset of vLLM's cache; restart the engine"
            )
        except Exception as error:  # of any kind: the workers are foreign code, or gone
            logger.debug("the workers do not say whether they have loaded weights", exc_info=error)
