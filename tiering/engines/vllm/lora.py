"""The restriction of requests with LoRA adapters to tiers that cannot confuse two adapters.

A block's hash covers the adapter's name (from vLLM 0.31 also its path), not its content. A request with an adapter
therefore uses no tier that outlives the process. Requests whose adapter name has stood for two adapters, or whose
adapter's files have changed, use no tier at all. Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiering.api.request_policy import parse_request_policy
from tiering.engines.vllm.hub_cache import newest_commit
from tiering.errors import ConfigError
from tiering.runtime.daemons import DaemonThreads

logger = logging.getLogger("kv_tiering.vllm")

_NOTHING = {"load": False, "store": False}
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files of an adapter that vLLM reads."""
_THREADS = 4
LOOK_SECONDS = 1.0
"""Longest time that a request waits for a look at its adapter's files, in seconds."""

Files = tuple[tuple[object, ...], ...]
"""Identity of an adapter's files: a change of it means that they may have changed."""


def files_of(path: str) -> Files | None:
    """Return what identifies the files of the adapter at ``path``, or None if there are none.

    Args:
        path: directory of the adapter, or the name of its repository on the Hugging Face hub. The commit that the local
            cache names as the newest identifies a repository.
    """
    place = Path(path).expanduser()
    if not place.is_dir():
        commit = newest_commit(path)
        return None if commit is None else ((path, commit),)
    found = []
    for name in _FILES:
        try:
            file = (place / name).stat()
        except FileNotFoundError:
            continue
        found.append((name, file.st_dev, file.st_ino, file.st_size, file.st_mtime_ns, file.st_ctime_ns))
    return tuple(found) or None


class AdapterGuard:
    """The policy for requests with LoRA adapters.

    vLLM reads an adapter's files whenever it needs an adapter that it does not hold, also one that it held before. So a
    thread looks at the files for every request, and a name whose files have changed stands for two adapters. The
    scheduler's thread calls all methods, and waits for none of these looks.

    Args:
        local_tiers: names of the secondary tiers whose blocks end with the process; default none.
        look: returns what identifies an adapter's files, by the adapter's path; default: :func:`files_of`.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        local_tiers: Iterable[str] = (),
        look: Callable[[str], Files | None] = files_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local_tiers = tuple(local_tiers)
        self._look, self._clock = look, clock
        self._threads = DaemonThreads("kv-tiering-adapters", _THREADS)
        self._known: dict[str, tuple[Any, Any]] = {}
        self._files: dict[str, Files] = {}
        self._ambiguous: set[str] = set()
        self._unseen: set[str] = set()
        """Names of the adapters whose files could not be looked at; each is logged once."""
        self.looking: dict[str, _Look] = {}
        """Requests that :meth:`admit` has left open, by id."""

    def admit(self, request: Any) -> Any:
        """Return a new request in the form that the scheduler half should see; None: :meth:`settle` does.

        A request without an adapter is returned unchanged; other requests get ``kv_transfer_params`` with restrictions.
        """
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return request
        name, path = str(lora.lora_name), getattr(lora, "lora_path", None)
        adapter = (lora.lora_int_id, path)
        if getattr(lora, "load_inplace", False) or self._known.setdefault(name, adapter) != adapter:
            self._confused(name)
        if name in self._ambiguous:
            return _without_tiers(request)
        self.looking[request.request_id] = look = _Look(self._clock() + LOOK_SECONDS)
        self._threads.run(partial(look.take, self._look, str(path)), look.fail)
        return None

    def settle(self, request: Any, *, wait: bool = True) -> Any:
        """Return a request that :meth:`admit` left open, as the scheduler half should see it.

        Args:
            request: a request in :attr:`looking`, which it leaves unless the result is None.
            wait: True to return None while the adapter's files are being looked at, for :data:`LOOK_SECONDS` at most;
                False if this is the last call for the request, which then uses no tier.
        """
        look = self.looking[request.request_id]
        if wait and not look.ended and self._clock() < look.until:
            return None
        del self.looking[request.request_id]
        name, files = str(request.lora_request.lora_name), look.files
        if files is None:
            if look.ended and name not in self._unseen:
                self._unseen.add(name)
                logger.warning("the files of the LoRA adapter %r cannot be looked at: its requests use no tier", name)
            return _without_tiers(request)
        if self._files.setdefault(name, files) != files:
            self._confused(name)
        if name in self._ambiguous:
            return _without_tiers(request)
        return RequestWithParams(request, without_persistent(request.kv_transfer_params, self._local_tiers))

    def reset(self) -> None:
        """Forget all adapters, because no block that was stored before is left."""
        self._known.clear()
        self._files.clear()
        self._ambiguous.clear()

    def shutdown(self) -> None:
        """End the threads; requests with adapters that come later use no tier."""
        self._threads.stop()

    def _confused(self, name: str) -> None:
        if name not in self._ambiguous:
            self._ambiguous.add(name)
            logger.warning(
                "the LoRA adapter %r was replaced, but its blocks are identified by its name: its requests neither "
                "load nor store KV until the prefix cache is reset together with the connector's",
                name,
            )


class _Look:
    """One look at the files of an adapter, for one request.

    Attributes:
        until: time until which the request waits.
        files: what identifies the files; None: not known.
        ended: True once the look has ended, which leaves :attr:`files` as it is.
    """

    __slots__ = ("ended", "files", "until")

    def __init__(self, until: float) -> None:
        self.until = until
        self.files: Files | None = None
        self.ended = False

    def take(self, look: Callable[[str], Files | None], path: str) -> None:
        try:
            self.files = look(path)
        except OSError as error:
            logger.debug("the LoRA adapter at %s: %s", path, error)
        finally:
            self.ended = True

    def fail(self) -> None:
        """End the look without a result."""
        self.ended = True


def _without_tiers(request: Any) -> RequestWithParams:
    return RequestWithParams(request, {**(request.kv_transfer_params or {}), "kv_tiering": _NOTHING})


class RequestWithParams:
    """A request with other ``kv_transfer_params``.

    All other attributes are read from the engine's object, so they stay current.
    """

    def __init__(self, request: Any, params: Mapping[str, Any] | None) -> None:
        self._request = request
        self.kv_transfer_params = params
        """The parameters that replace those of the engine's request."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def without_persistent(params: Mapping[str, Any] | None, tiers: Sequence[str]) -> Mapping[str, Any] | None:
    """Return ``params`` restricted to ``tiers``.

    Args:
        params: the request's ``kv_transfer_params``; invalid parameters are returned unchanged.
        tiers: names of the allowed secondary tiers.
    """
    try:
        asked = parse_request_policy(params).tiers
    except ConfigError:
        return params  # the scheduler half logs the problem; the request neither loads nor stores
    allowed = [tier for tier in tiers if asked is None or tier in asked]
    return {**(params or {}), "kv_tiering": {**((params or {}).get("kv_tiering") or {}), "tiers": allowed}}
