"""The blocks that a tier of the service holds, in memory that its engines read.

A *mark* is 8 bytes: a hash of a block's key under a random seed, and 0 for none. Marks lie in buckets of eight, each in
one of two buckets that its bits name. The memory is a sealed file. Its first page has the magic and the *state*, one
word with the seed and the size of the present table. The table of ``2**bits`` buckets begins at bucket ``2**bits``, so
that a table, and the next one of twice the size, have room of their own::

    page 0          bucket 64            128                       256
    | magic, state  | table of 64        | table of 128            | ...

The service's thread alone writes. A table grows at a load of 0.6, a part with each call: what is noted meanwhile enters
both tables where the next one has the bucket already. The next one is complete before the state names it.
A clear changes the seed, which makes all marks unrecognizable, and returns to the first table. Engines map the file
for reading; the kernel refuses any other map (F_SEAL_FUTURE_WRITE).

What is read is a hint, which no reader waits for: a block may have gone, or come, meanwhile. A load that finds nothing
is a miss.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import struct
from collections.abc import Sequence
from itertools import repeat

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tiering.api.keys import OffloadKey
from tiering.errors import RegionError
from tiering.primary.memory.region import make_sealed

_log = logging.getLogger("kv_tiering.machine")

MAGIC = int.from_bytes(b"KVMARKS1", "little")
"""First word of the file; another form has another one."""

BUCKET = 8
"""Marks of a bucket."""

FIRST_BITS, MOST_BITS = 6, 24
"""The first table has ``2**FIRST_BITS`` buckets, the largest ``2**MOST_BITS``."""

MOST_LOAD = 0.6
"""Share of a table's marks in use at which it grows."""

_BUCKET_BYTES = 8 * BUCKET
_BYTES = _BUCKET_BYTES << (MOST_BITS + 1)
_STATE_AT = 1
_BITS = 8
_SEED_BYTES = 7
_ADD_SEALS, _GET_SEALS, _SEAL, _SHRINK, _FUTURE_WRITE = 1033, 1034, 0x1, 0x2, 0x10
_AT_ONCE = 256
_GROWN_PER_KEY, _LEAST_GROWN = 16, 1 << 10
"""Buckets that grow with each key that is noted, and at least with each call."""

_bucket = struct.Struct("8Q").unpack_from
_CHOICES = np.array([[0], [32]], np.uint64)
"""Bits of a mark from which on it names its buckets."""

_Marks = NDArray[np.uint64]


def _mark(key: OffloadKey, seed: int) -> int:
    return xxh3_64_intdigest(key, seed) or 1


def _mapped(fd: int, protection: int) -> mmap.mmap:
    """Map the file; a core dump would make all its pages.

    Children have the map too: the end of one that they lacked would unmap what lies in its place there.
    """
    found = mmap.mmap(fd, _BYTES, mmap.MAP_SHARED, protection)
    found.madvise(mmap.MADV_DONTDUMP)
    return found


class Presence:
    """The blocks of a tier, as an engine reads them.

    Args:
        fd: descriptor of the file, which the caller keeps.

    Raises:
        RegionError: it is no such file, or that of another version.
        OSError: the file cannot be mapped.
    """

    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size != _BYTES or not fcntl.fcntl(fd, _GET_SEALS) & _SHRINK:
            raise RegionError("it has another size, or anyone could cut it")
        self._map = _mapped(fd, mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")
        self._buckets: _Marks = np.frombuffer(self._map, np.uint64).reshape(-1, BUCKET)
        if self._words[0] != MAGIC:
            raise RegionError("it has another form")

    def leading(self, keys: Sequence[OffloadKey]) -> int:
        """Return the number of leading keys that the tier holds, as far as it has noted."""
        state = self._words[_STATE_AT]
        bits, seed = state & 0xFF, state >> _BITS
        if not keys or not FIRST_BITS <= bits <= MOST_BITS:
            return 0
        size = 1 << bits
        mark = xxh3_64_intdigest(keys[0], seed) or 1
        if mark not in _bucket(self._map, (mark & (size - 1) | size) * _BUCKET_BYTES) and mark not in _bucket(
            self._map, (mark >> 32 & (size - 1) | size) * _BUCKET_BYTES
        ):
            return 0
        held, count = 1, len(keys)
        while held < count:
            part = keys[held : held + _AT_ONCE]
            found = self._find(part, seed, size)
            if not found.all():
                return held + int((found == 0).argmax())
            held += len(part)
        return count

    def _find(self, keys: Sequence[OffloadKey], seed: int, size: int) -> _Marks:
        """Return a word per key, 0 for one that has no mark."""
        marks = np.fromiter(map(xxh3_64_intdigest, keys, repeat(seed)), np.uint64, len(keys))
        marks[marks == 0] = 1
        at = (marks >> _CHOICES & np.uint64(size - 1) | np.uint64(size)).view(np.int64)
        equal = (self._buckets.take(at, 0) == marks[:, None]).view(np.uint64)
        found: _Marks = (equal[0] | equal[1])[:, 0]
        return found


class PresenceTable:
    """The blocks of a tier, as the service notes them.

    The service's thread calls all methods.

    Args:
        name: name of the tier, for the log.

    Raises:
        RegionError: the memory cannot be made.
        OSError: the memory cannot be made, or the kernel is older than Linux 5.1.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.fd = make_sealed("kv-tiering-presence", _BYTES)
        """Descriptor of the file, which engines get as well."""
        try:
            self._map = _mapped(self.fd, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(self.fd, _ADD_SEALS, _FUTURE_WRITE | _SEAL)
            os.posix_fallocate(self.fd, 0, 2 * _BUCKET_BYTES << FIRST_BITS)
        except BaseException:
            os.close(self.fd)
            raise
        self._words = memoryview(self._map).cast("Q")
        self._buckets: _Marks = np.frombuffer(self._map, np.uint64).reshape(-1, BUCKET)
        self._words[0] = MAGIC
        self.clear()

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier holds ``keys``."""
        for first in range(0, len(keys), _AT_ONCE):
            part = keys[first : first + _AT_ONCE]
            is_due = self._count + len(part) >= MOST_LOAD * BUCKET * self._size
            if self._grown is not None or (is_due and self._grows):
                self._grow(max(_LEAST_GROWN, _GROWN_PER_KEY * len(part)))
            for key in part:
                self._note(_mark(key, self._seed))

    def _note(self, mark: int) -> None:
        first, second = self._choices(mark)
        one, two = _bucket(self._map, first * _BUCKET_BYTES), _bucket(self._map, second * _BUCKET_BYTES)
        if mark in one or mark in two:
            return
        bucket, marks = (first, one) if one.count(0) >= two.count(0) else (second, two)
        if 0 in marks:  # else both are full, and the block is a miss
            self._set(bucket, marks.index(0), mark, mark)
            self._count += 1

    def removed(self, keys: Sequence[OffloadKey]) -> None:
        """Note that the tier does not hold ``keys`` any more."""
        for key in keys:
            mark = _mark(key, self._seed)
            for bucket in self._choices(mark):
                marks = _bucket(self._map, bucket * _BUCKET_BYTES)
                if mark in marks:
                    self._set(bucket, marks.index(mark), mark, 0)
                    self._count -= 1
                    break

    def _set(self, bucket: int, place: int, mark: int, word: int) -> None:
        """Write ``word`` at a place of a bucket for ``mark``, also in the next table if that has the bucket."""
        self._words[BUCKET * bucket + place] = word
        if self._grown is not None and bucket - self._size < self._grown:
            self._words[BUCKET * self._next_of(bucket, mark) + place] = word

    def _next_of(self, bucket: int, mark: int) -> int:
        """Return the bucket of the next table to which ``mark`` goes from a bucket of the present one."""
        home = bucket - self._size
        by = mark if mark & (self._size - 1) == home else mark >> 32
        return 2 * self._size + home + self._size * bool(by & self._size)

    def clear(self) -> None:
        """Note that the tier holds nothing; the cost does not depend on what it held."""
        self._seed = secrets.randbits(8 * _SEED_BYTES)
        self._count, self._size, self._grows = 0, 1 << FIRST_BITS, True
        self._grown: int | None = None
        """Buckets that the next table has, of those of the present one; None: it is not being made."""
        self._buckets[self._size : 2 * self._size] = 0
        self._words[_STATE_AT] = self._seed << _BITS | FIRST_BITS

    def close(self) -> None:
        """Close the file, of a tier that was shut down; engines that have mapped it keep it."""
        self._words.release()
        self._buckets = np.empty((0, BUCKET), np.uint64)
        self._map.close()
        os.close(self.fd)

    def _choices(self, mark: int) -> tuple[int, int]:
        mask = self._size - 1
        return mark & mask | self._size, mark >> 32 & mask | self._size

    def _grow(self, count: int) -> None:
        """Enter the marks of ``count`` buckets into a table of twice the size, each at its old place.

        All at once would take the thread half a second for tens of millions of blocks.
        """
        size, bits, start = self._size, self._size.bit_length(), self._grown or 0
        end = min(size, start + count)
        try:
            if bits > MOST_BITS:
                raise RegionError("it has its largest size")
            for first in (2 * size, 3 * size):
                os.posix_fallocate(self.fd, (first + start) * _BUCKET_BYTES, (end - start) * _BUCKET_BYTES)
        except (OSError, RegionError) as error:
            _log.warning("tier %s: the table of its blocks cannot grow, so engines miss some: %s", self._name, error)
            self._grows, self._grown = False, None
            return
        marks = self._buckets[size + start : size + end]
        home = np.arange(start, end, dtype=np.uint64)[:, None]
        by = np.where(marks & np.uint64(size - 1) == home, marks, marks >> _CHOICES[1])
        upper = (by & np.uint64(size)).astype(np.bool_)
        self._buckets[2 * size + start : 2 * size + end] = np.where(upper, 0, marks)
        self._buckets[3 * size + start : 3 * size + end] = np.where(upper, marks, 0)
        self._grown = end
        if end == size:
            self._size, self._grown = 2 * size, None
            self._words[_STATE_AT] = self._seed << _BITS | bits
