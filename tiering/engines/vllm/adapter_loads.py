"""The identities of the LoRA adapters that a worker has loaded.

An adapter's identity is the content of its files, with the settings of vLLM that affect their use. The files
are read and looked at before and after each load of the worker's LoRA manager: a first load, one after an eviction, and
one in place. What was loaded is copied, because safetensors maps files: a file that is written in place would change
the adapter that the worker holds. A load of files that changed meanwhile, or that cannot be read, has an identity of
its own (:func:`is_private`).

vLLM loads an adapter when a request is first scheduled. The files of an adapter that is not loaded yet are read on a
thread beside the engine, so that its first request can find blocks. What the load then reads is compared. Nothing here
imports vLLM.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from tiering.engines.vllm.hub_cache import newest_commit, snapshot_of
from tiering.engines.vllm.weights import Seen, changed_of, digest_of, plain, records_of
from tiering.runtime.pool import ThreadPool

logger = logging.getLogger("kv_tiering.vllm")

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""The files of an adapter that vLLM reads."""
_NOT_CONTENT = frozenset(
    {
        *("max_lora_rank", "max_loras", "max_cpu_loras", "default_mm_loras"),
        *("specialize_active_lora", "max_lora_cls_labels"),
    }
)
"""Words of vLLM's LoRA configuration that do not affect the KV of an adapter; all other words do."""
_METHOD = "_load_adapter"
_TENSORS = ("lora_a", "lora_b", "weight", "bias")
"""Attributes of a layer of an adapter that are tensors, lists of tensors, or None."""
MAX_ADAPTERS = 1 << 14
"""Largest number of adapters that are remembered; each loading by hand makes another one.

Beyond it, the one whose use is longest ago is dropped.
"""
_3D = " 3d"
_observers: list[AdapterLoads] = []

AdapterCheck = tuple[str, str, set[int]]
"""Key of an adapter, its identity when KV was loaded for it ("": not known), and the GPU blocks."""

AdapterFiles = tuple[str, bool]
"""Path of an adapter as vLLM was given it, and True if its weights have three dimensions."""

UNREAD = "unread"
"""Reported for an adapter that is not loaded and whose files cannot be read yet."""
_PRIVATE = "load "

T = TypeVar("T")


class RecentAdapters(dict[str, T]):
    """Values of at most :data:`MAX_ADAPTERS` adapters by key, in the order of their latest use."""

    def use(self, key: str) -> T | None:
        """Return the value of ``key``, whose use is the latest now; None if there is none."""
        value = self.pop(key, None)
        if value is not None:
            self[key] = value
        return value

    def put(self, key: str, value: T, kept: Callable[[], Container[str]] = frozenset) -> None:
        """Set the value of ``key``, whose use is the latest now, and drop the oldest values beyond the bound.

        Args:
            kept: returns the keys whose values are not dropped; default: none.
        """
        self.pop(key, None)
        self[key] = value
        if len(self) > MAX_ADAPTERS:
            in_use = kept()
            for oldest in list(islice(self, len(self) - MAX_ADAPTERS)):
                if oldest not in in_use:
                    del self[oldest]


def key_of(lora_request: Any) -> str:
    """Return the key of an adapter: the number by which vLLM's workers know the adapter, and its name.

    Workers may hold several adapters of one name. They hold one adapter of a number, and compute with it whatever name
    and path a request has.
    """
    return f"{lora_request.lora_int_id} {lora_request.lora_name}"


def _number_of(key: str) -> str:
    """Return the number in an adapter's key."""
    return key.partition(" ")[0]


def name_of(key: str) -> str:
    """Return the name in an adapter's key."""
    return key.partition(" ")[2]


def is_private(identity: str) -> bool:
    """Return True if an identity stands for one load of one engine, whose content is not known."""
    return identity.startswith(_PRIVATE)


@dataclass(slots=True)
class _Held:
    """An adapter that the manager has loaded and may still hold."""

    identity: str
    """Identity; "" if it is not known."""
    keys: set[str]
    """The keys that were asked for or loaded with its number."""


class AdapterLoads:
    """The identities of the adapters that the LoRA manager of one worker has loaded.

    Args:
        lora_config: vLLM's object; it tells this engine's manager from others in the process.
        engine_id: name of the engine; default: "".
        reads: True to read the files of adapters that are not loaded yet, as one worker of an engine does; default:
            True.
    """

    def __init__(self, lora_config: Any, engine_id: str = "", *, reads: bool = True) -> None:
        self._config = lora_config
        self._engine_id = engine_id
        self._reads = reads
        words = plain({word: value for word, value in _words(lora_config).items() if word not in _NOT_CONTENT})
        self._settings = json.dumps(words, sort_keys=True)
        self._held = RecentAdapters[_Held]()
        """Adapters by number."""
        self._news: dict[str, str] = {}
        self._loads = 0
        """Number of loads, equal on all workers of an engine."""
        self._read: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._reader = ThreadPool("kv-tiering-adapter", 1)

    def observe(self, managers: Iterable[type]) -> None:
        """Observe all loads until :meth:`close`. If that is impossible, a line in the log says so.

        Args:
            managers: vLLM's classes of managers.
        """
        try:
            owners: set[Any] = {next(one for one in kind.__mro__ if _METHOD in vars(one)) for kind in managers}
            for owner in owners:
                load = vars(owner)[_METHOD]
                if not hasattr(load, "kv_tiering"):
                    inspect.signature(load).bind(None, None)
                    inspect.signature(owner.list_adapters).bind(None)
                    setattr(owner, _METHOD, _observed(load))
        except (AttributeError, StopIteration, TypeError) as error:
            logger.warning("the loading of LoRA adapters cannot be observed: their requests use no tier (%s)", error)
            return
        _observers.append(self)

    def close(self) -> None:
        """Stop observing; repeated calls are harmless."""
        self._reader.stop()
        if self in _observers:
            _observers.remove(self)

    def is_of(self, manager: Any) -> bool:
        """Return True if ``manager`` is this engine's."""
        return getattr(manager, "lora_config", None) is self._config

    def record(self, key: str, content: str | None, held: Iterable[int] = ()) -> None:
        """Record a load.

        Args:
            key: key of the adapter.
            content: identity of the content of its files; "" if that is not known; None if what was loaded may change.
            held: numbers of the adapters that the manager holds, which are not dropped; default: none.
        """
        self._loads += 1
        if content is None:
            identity = ""
        elif content:
            identity = self._identity(content)
        else:
            identity = f"{_PRIVATE}{self._loads} of {self._engine_id}"
        if not content:
            logger.warning(
                "the files of the LoRA adapter %r changed while it was loaded, or are not known: its requests use %s "
                "until it is loaded again",
                name_of(key),
                "no tier" if content is None else "the CPU tier only",
            )
        known = self._held.get(_number_of(key))
        keys = {key} if known is None else known.keys | {key}
        if any(self._news.get(one, identity) != identity for one in keys):
            identity = ""  # two loads since the last report
        self._news |= dict.fromkeys(keys, identity)
        self._held.put(_number_of(key), _Held(identity, keys), lambda: set(map(str, held)))

    def _identity(self, content: str) -> str:
        return hashlib.sha256(f"{content}\0{self._settings}".encode()).hexdigest()

    def read(self, adapters: Mapping[str, AdapterFiles]) -> None:
        """Begin to read the files of adapters; :meth:`take_news` returns their identities, or :data:`UNREAD`.

        Args:
            adapters: files by key. Those that are loaded already are not read.
        """
        for key, files in adapters.items():
            if (held := self._held.get(_number_of(key))) is not None:
                held.keys.add(key)
                self._news.setdefault(key, held.identity)
            elif self._reads:
                self._reader.run(partial(self._read_one, key, *files), partial(self._not_read, key))

    def _read_one(self, key: str, path: str, has_3d: bool) -> None:
        content = _content(path)
        self._read.put((key, self._identity(content + _3D * has_3d) if content else UNREAD))

    def _not_read(self, key: str, error: Exception) -> None:
        self._read.put((key, UNREAD))

    def check(self, checks: Iterable[AdapterCheck]) -> set[int]:
        """Return the blocks whose KV belongs to other adapters than this worker computes with.

        The identities that the checks ask for are reported.
        """
        stale: set[int] = set()
        for key, identity, blocks in checks:
            adapter = self._held.use(_number_of(key))
            if adapter is not None:
                adapter.keys.add(key)
            held = "" if adapter is None else adapter.identity
            if not identity:
                self._news.setdefault(key, held)
            elif held != identity:
                stale |= blocks
        return stale

    def take_news(self) -> dict[str, str]:
        """Return the identities to report, by key, and forget that they are to be reported."""
        while not self._read.empty():
            key, identity = self._read.get()
            if _number_of(key) not in self._held:
                self._news[key] = identity
        news, self._news = self._news, {}
        return news


def _observed(load: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(load)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        observers = [one for one in _observers if one.is_of(self)]
        if not observers:
            return load(self, lora_request)
        adapter = _Adapter(str(lora_request.lora_path))
        loaded = load(self, lora_request)
        content = adapter.content() if _detach(loaded) else None
        if content and getattr(lora_request, "tensorizer_config_dict", None):
            content = ""  # read from another place
        elif content and getattr(lora_request, "is_3d_lora_weight", False):
            content += _3D
        for one in observers:
            one.record(key_of(lora_request), content, self.list_adapters())
        return loaded

    _load_adapter.kv_tiering = True  # type: ignore[attr-defined]
    return _load_adapter


class _Adapter:
    """The files of an adapter before it is loaded.

    Args:
        path: directory of the adapter, or the name of its repository on the Hugging Face hub.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._before = _recorded(path)
        self._content = _content(path)

    def content(self) -> str:
        """Return the digest of the files, or "" if they may not be what was loaded since."""
        content, after = _content(self._path), _recorded(self._path)
        if not after or changed_of(self._before, after) is not None:
            return ""
        if not self._before and not Path(self._path).expanduser().is_dir():
            # vLLM has downloaded a repository of the hub. Another process may have added a newer commit since.
            return content if len(list(Path(next(iter(after))).parent.parent.iterdir())) == 1 else ""
        return content if (content, after.keys()) == (self._content, self._before.keys()) else ""


def _detach(loaded: Any) -> bool:
    """Copy the tensors of a loaded adapter; return False if that is impossible.

    The tensors may be mapped from the adapter's files.

    Args:
        loaded: vLLM's object.
    """
    try:
        layers = [*loaded.loras.values(), *getattr(loaded, "modules_to_save", {}).values()]
        for layer in layers:
            for name in _TENSORS:
                value = getattr(layer, name, None)
                if value is not None:
                    setattr(layer, name, [_copy(one) for one in value] if isinstance(value, list) else _copy(value))
    except (AttributeError, TypeError) as error:
        logger.debug("the tensors of a LoRA adapter cannot be copied", exc_info=error)
        return False
    return bool(layers)


def _copy(tensor: Any) -> Any:
    """Return a copy of a tensor that may be mapped from a file, as neither pinned memory nor a GPU's is."""
    return tensor if tensor is None or tensor.device.type != "cpu" or tensor.is_pinned() else tensor.clone()


def _words(config: Any) -> dict[str, Any]:
    """Return the words of vLLM's configuration."""
    return dict(getattr(config, "__dict__", {}))


def _files(path: str) -> Sequence[Path]:
    """Return the paths of an adapter's files, also of absent ones; empty: the adapter is not known."""
    place: Path | None = Path(path).expanduser()
    if place is not None and not place.is_dir():
        # With this setting vLLM downloads from another hub, to another place.
        commit = None if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("true", "1") else newest_commit(path)
        place = None if commit is None else snapshot_of(path, commit, None)
    return () if place is None else [place / name for name in _FILES]


def _recorded(path: str) -> Seen:
    """Return what the file system records of an adapter's files; empty: there are none."""
    try:
        files = [file for file in _files(path) if file.exists()]
        return records_of(files[0].parent, files) if files else {}
    except OSError as error:
        logger.debug("the LoRA adapter at %s: %s", path, error)
        return {}


def _content(path: str) -> str:
    """Return a digest of the names and contents of an adapter's files, or "" if they cannot be read."""
    try:
        return " ".join(f"{file.name}:{digest_of(file)}" for file in _files(path) if file.exists())
    except OSError as error:
        logger.debug("the LoRA adapter at %s: %s", path, error)
        return ""
