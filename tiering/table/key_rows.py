"""The keys of a table with their rows, in several dictionaries.

A dictionary that grows, or that has replaced most of its keys, is built anew in one go. With 10 million keys, that
takes most of a second. Large tables therefore have several dictionaries, chosen by the first byte of a key, because
keys begin with a hash. Very large ones have more, chosen by the first bits of Python's hash of a key, which costs some
nanoseconds more. The dictionaries' shares of the keys differ, so that they are built anew at different times. A small
table has one dictionary: neighbours in time are then neighbours in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, count, repeat, takewhile
from operator import contains, delitem, getitem, itemgetter, not_, rshift, setitem
from sys import hash_info

UNDIVIDED_ROWS = 1 << 16
"""Largest number of rows of a table with one dictionary."""

_KEYS_PER_TABLE = 1 << 13
"""Keys in each of several dictionaries, on average. One is built anew in about 1 ms."""

Keys = dict[bytes, int]
"""Key → row."""

_MOST_TABLES_BY_BYTE = 128
_MOST_TABLES = 1 << 12
"""Largest number of dictionaries: a reset creates as many."""

_first = itemgetter(0)


class KeyRows(Mapping[bytes, int]):
    """Key → row of many blocks. The methods that take several keys run without Python code for each key.

    Args:
        num_rows: largest number of keys.
    """

    __slots__ = ("_different", "_one", "_shift", "_tables")

    def __init__(self, num_rows: int) -> None:
        self._create(1 if num_rows <= UNDIVIDED_ROWS else min(-(-num_rows // _KEYS_PER_TABLE), _MOST_TABLES))

    def _create(self, count: int) -> None:
        self._different: list[Keys] = [{} for _ in range(count)]
        self._one = self._different[0] if count == 1 else None
        by_byte = count <= _MOST_TABLES_BY_BYTE
        bits = 8 if by_byte else 3 + count.bit_length()
        self._shift = None if by_byte else hash_info.width - bits
        """Bits of a hash below those that are the index of its dictionary; None: the first byte is the index."""
        self._tables: list[Keys] = []
        """Dictionary of each first byte, or of each range of hashes; empty if there is one dictionary."""
        for number, table in enumerate(self._different[count == 1 :], 1):
            end = round((2 ** (number / count) - 1) * 2**bits)
            self._tables += [table] * (end - len(self._tables))

    def take(self) -> list[Keys]:
        """Remove all keys, and return their dictionaries, at a cost that does not depend on the sizes."""
        taken = self._different
        self._create(len(taken))
        return taken

    def __contains__(self, key: object) -> bool:
        one = self._one
        return key in (self._table_of(key) if one is None else one)  # type: ignore[arg-type]

    def __getitem__(self, key: bytes) -> int:
        one = self._one
        return self._table_of(key)[key] if one is None else one[key]

    def _table_of(self, key: bytes) -> Keys:
        """Return the dictionary of a key of a divided table."""
        return self._tables[key[0] if self._shift is None else hash(key) >> self._shift]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._different)

    def __len__(self) -> int:
        return sum(map(len, self._different))

    def _tables_of(self, keys: Iterable[bytes]) -> Sequence[Keys]:
        """Return the dictionary of each key of a divided table."""
        shift = self._shift
        places = map(_first, keys) if shift is None else map(rshift, map(hash, keys), repeat(shift))
        # One call for all keys, a quarter faster than a call for each; for a single place, the result is no tuple.
        tables: tuple[Keys, ...] = itemgetter(0, 0, *places)(self._tables)
        return tables[2:]

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
