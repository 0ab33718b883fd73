"""The keys of a table with their rows, in several dictionaries.

A dictionary that grows, or that has replaced most of its keys, is built anew in one go. With 10 million keys, that
takes most of a second. Large tables therefore have several dictionaries, chosen by the first byte of a key. Keys begin
with a hash, so that the dictionaries have about the same size, and each is built anew at another time. There are no
more dictionaries than needed, and a small table has one: the search for the right one costs some nanoseconds for each
key, and neighbours in time are neighbours in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count, repeat, takewhile
from operator import contains, delitem, getitem, itemgetter, not_, setitem

UNDIVIDED_ROWS = 1 << 17
"""Largest number of rows of a table with one dictionary, which is built anew in less than 5 ms."""

_KEYS_PER_TABLE = 1 << 16
"""Keys in each of several dictionaries, with up to 16 million rows; built anew in about 2 ms."""

Keys = dict[bytes, int]
"""Key → row."""

_FIRST_BYTES = 256
_first = itemgetter(0)


class KeyRows(Mapping[bytes, int]):
    """Key → row of many blocks. The methods that take several keys run without Python code for each key.

    Args:
        num_rows: largest number of keys.
    """

    __slots__ = ("_different", "_one", "_tables")

    def __init__(self, num_rows: int) -> None:
        count = 1
        while num_rows > UNDIVIDED_ROWS and count < _FIRST_BYTES and num_rows > count * _KEYS_PER_TABLE:
            count *= 2
        self._create(count)

    def _create(self, count: int) -> None:
        self._different: list[Keys] = [{} for _ in range(count)]
        self._tables = self._different * (_FIRST_BYTES // count)
        """Dictionary of each first byte."""
        self._one = self._different[0] if count == 1 else None

    def take(self) -> list[Keys]:
        """Remove all keys, and return their dictionaries, at a cost that does not depend on the sizes."""
        taken = self._different
        self._create(len(taken))
        return taken

    # --------------------------------------------------------------------------------------------------------- one key

    def __contains__(self, key: object) -> bool:
        one = self._one
        return key in (self._tables[key[0]] if one is None else one)  # type: ignore[index]

    def __getitem__(self, key: bytes) -> int:
        one = self._one
        return self._tables[key[0]][key] if one is None else one[key]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._different)

    def __len__(self) -> int:
        return sum(map(len, self._different))

    # ------------------------------------------------------------------------------------------------------- many keys

    def _tables_of(self, keys: Iterable[bytes]) -> Iterator[Keys]:
        """Return the dictionary of each key of a divided table."""
        return map(self._tables.__getitem__, map(_first, keys))

    def leading(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading ``keys`` that are known."""
        one = self._one
        if one is not None:
            return len(list(takewhile(one.__contains__, keys)))
        return next(compress(count(), map(not_, map(contains, self._tables_of(keys), keys))), len(keys))

    def disjoint(self, keys: Sequence[bytes]) -> bool:
        """Return True if none of ``keys`` is known."""
        one = self._one
        if one is not None:
            return one.keys().isdisjoint(keys)
        return True not in map(contains, self._tables_of(keys), keys)

    def known(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of ``keys`` that are known."""
        one = self._one
        if one is not None:
            return list(filter(one.__contains__, keys))
        return list(compress(keys, map(contains, self._tables_of(keys), keys)))

    def rows(self, keys: Sequence[bytes]) -> Iterator[int]:
        """Return the row of each of ``keys``. The iterator raises KeyError at an unknown one."""
        one = self._one
        if one is not None:
            return map(one.__getitem__, keys)
        return map(getitem, self._tables_of(keys), keys)

    def rows_or_none(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the row of each of ``keys``, None for an unknown one."""
        one = self._one
        if one is not None:
            return list(map(one.get, keys, repeat(None)))
        return list(map(Keys.get, self._tables_of(keys), keys))

    def put(self, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Record the row of each of ``keys``."""
        one = self._one
        if one is not None:
            one.update(zip(keys, rows, strict=True))
        else:
            deque(map(setitem, self._tables_of(keys), keys, rows), maxlen=0)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove ``keys``, which are known."""
        one = self._one
        if one is not None:
            deque(map(one.__delitem__, keys), maxlen=0)
        else:
            deque(map(delitem, self._tables_of(keys), keys), maxlen=0)
