"""Documents with the keys of the blocks that an engine uses most, for engines that start later.

Each engine replaces a document of its own, ``hot-NAMESPACE-ENGINE``. A document is a hint and never trusted: an engine
that starts looks the keys up as a request would, and every frame is verified. A document counts for
:data:`HOT_SECONDS` after it was written, and only in the namespace and epoch that it names.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import takewhile
from typing import overload

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.api.namespace import Namespace
from tiering.medium.sealed import SealedLayout

HOT = "hot-"
"""Prefix of the names of all documents with hot keys."""

HOT_SECONDS = 600.0
"""Seconds after its writing, or before it by a clock that is wrong, for which a document counts."""

MAX_BYTES = 512 << 10
"""Largest size of a document in bytes."""

_LAYOUT = SealedLayout(b"KVTHOTKY\x01\x00", "H4xII16sd")
_RUN_BYTES = 4
LONGEST_RUN = 64
"""Largest number of keys that :class:`PackedRuns` returns at once."""

_PART = 512
"""Keys that are counted at once, before other threads run."""

Run = Sequence[OffloadKey]
"""Keys that follow one another in a prefix."""


def hot_documents(namespace: Namespace) -> str:
    """Return the prefix of the names of all documents with hot keys of ``namespace``."""
    return f"{HOT}{namespace.directory}-"


def hot_document(namespace: Namespace, engine: str) -> str:
    """Return the name of the document of one engine.

    Args:
        namespace: namespace of the engine's blocks.
        engine: any text that other engines do not have.
    """
    return f"{hot_documents(namespace)}{xxh3_64_hexdigest(engine.encode())}"


def runs_of(chains: Sequence[Sequence[OffloadKey]], pause: Callable[[], object] = lambda: time.sleep(0)) -> list[Run]:
    """Return the blocks of prefixes, each block once and the hottest first, as runs.

    Blocks that several prefixes share come first, and then the other ones. Both are in the order of their last use.
    The keys of each KV-cache group are runs of their own.

    Args:
        chains: prefixes that were used, the most recent one last.
        pause: function that lets other threads run, once per :data:`_PART` keys; default: one that gives up the
            interpreter.
    """
    uses: Counter[OffloadKey] = Counter()
    pauses = _Pauses(pause)
    for chain in chains:
        for start in range(0, len(chain), _PART):
            part = chain[start : start + _PART]
            uses.update(part)
            pauses.count(part)
    seen: dict[OffloadKey, None] = {}
    runs: list[Run] = []
    for least in (2, 1):
        for chain in reversed(chains):
            for run in _new_runs(chain, lambda key: uses[key] >= least, seen, pauses):  # noqa: B023 (used at once)
                runs.append(run)
                seen.update(dict.fromkeys(run))
                if len(seen) * len(run[0]) >= MAX_BYTES:
                    return runs
    return runs


class _Pauses:
    """Pauses of a long calculation, one per :data:`_PART` keys, however short the prefixes are.

    A pause takes some 60 µs, so that one per prefix would take half a minute for prefixes of one block.
    """

    def __init__(self, pause: Callable[[], object]) -> None:
        self._pause = pause
        self._keys = 0

    def count(self, part: Run) -> None:
        """Pause if enough keys were counted since the last time."""
        self._keys += len(part)
        if self._keys >= _PART:
            self._keys = 0
            self._pause()


def _new_runs(
    chain: Run, is_hot: Callable[[OffloadKey], bool], seen: Container[OffloadKey], pauses: _Pauses
) -> Iterator[Run]:
    """Yield those leading keys of each group of a prefix that are hot and not among ``seen``."""
    ended: set[bytes] = set()
    for start in range(0, len(chain), _PART):
        part = chain[start : start + _PART]
        pauses.count(part)
        for group in dict.fromkeys([key[-GROUP_BYTES:] for key in part]):
            if group not in ended:
                keys = [key for key in part if key.endswith(group)]
                hot = list(takewhile(is_hot, keys))
                if len(hot) < len(keys):
                    ended.add(group)
                if run := [key for key in hot if key not in seen]:
                    yield run


def pack(namespace: Namespace, written: float, runs: Sequence[Run]) -> bytes:
    """Return a document with as many of the leading keys as fit; empty if there is no key.

    Args:
        namespace: namespace in the present epoch.
        written: time of the writing, in seconds since 1970.
        runs: the keys, hottest first. Keys whose length is not that of the first one are left out.
    """
    size = len(runs[0][0]) if runs else 0
    if not 0 < size < 1 << 16:
        return b""
    left = MAX_BYTES - _LAYOUT.size
    lengths: list[int] = []
    keys: list[OffloadKey] = []
    for run in runs:
        fitting = max(0, (left - _RUN_BYTES) // size)
        chosen = [key for key in run[:fitting] if len(key) == size]
        if not fitting:
            break
        if chosen:
            lengths.append(len(chosen))
            keys += chosen
            left -= _RUN_BYTES + len(chosen) * size
    content = b"".join([np.array(lengths, "<u4").tobytes(), *keys])
    return _LAYOUT.pack(size, len(lengths), len(keys), namespace.fingerprint, written, content=content)


class PackedRuns(Sequence[Run]):
    """The runs of one document, cut from its bytes when they are needed; a long run is several ones.

    Args:
        data: the content of the document.
        size: length of a key in bytes.
        bounds: positions in ``data`` at which each run starts and ends, in two rows.
    """

    def __init__(self, data: bytes, size: int, bounds: NDArray[np.int64]) -> None:
        self._data = data
        self._size = size
        self._bounds = bounds

    def __len__(self) -> int:
        return int(self._bounds.shape[1])

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...

    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        if isinstance(index, slice):
            return PackedRuns(self._data, self._size, self._bounds[:, index])
        start, stop = self._bounds[:, index].tolist()
        return [self._data[at : at + self._size] for at in range(start, stop, self._size)]


def parse(data: bytes, namespace: Namespace, now: float) -> PackedRuns | None:
    """Return the runs of a document; None if it is damaged, stale, or of another epoch or version.

    Args:
        data: bytes of the document, of any origin.
        namespace: namespace in the present epoch.
        now: seconds since 1970.
    """
    if len(data) > MAX_BYTES or (found := _LAYOUT.parse(data)) is None:
        return None
    (size, count, total, fingerprint, written), content = found
    first = count * _RUN_BYTES
    if (
        fingerprint != namespace.fingerprint
        or size <= GROUP_BYTES
        or first + total * size != len(content)
        or not abs(now - written) <= HOT_SECONDS
    ):
        return None
    lengths = np.frombuffer(content, "<u4", count).astype(np.int64)
    stops = np.cumsum(lengths)
    if not count or stops[-1] != total or not lengths.all():
        return None
    # Cut where a run starts, and after each part of it.
    parts = -(-lengths // LONGEST_RUN)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.repeat(stops - lengths, parts) + number * LONGEST_RUN
    ends = np.minimum(starts + LONGEST_RUN, np.repeat(stops, parts))
    return PackedRuns(content, size, first + np.stack([starts, ends]) * size)
