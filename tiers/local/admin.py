"""Administration of a local tier's directory: contents, collection and epochs.

A directory that an engine owns is only read. Reads drop their pages from the page cache, and a block that changes while
it is read is not damaged.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiering import InUseError, OutOfSpaceError, PermanentStoreError
from tiering.tier import (
    DESCRIBED,
    EPOCHS,
    HEADER_BYTES,
    HOT,
    HOT_SECONDS,
    SPEED_SECONDS,
    SPEEDS,
    Adopted,
    Collected,
    CorruptReason,
    EpochState,
    Files,
    Finding,
    FrameHeader,
    KnownNamespace,
    Limits,
    Severity,
    StoredBlock,
    TierAdmin,
    TierOptions,
    format_bytes,
    hint_namespace,
    known_namespaces,
    namespace_of,
    parse_header,
    store_error,
    store_errors,
)
from tiers.local.adopt import adopt
from tiers.local.checkpoint import CHECKPOINT_NAME
from tiers.local.device import device_speed, probe_direct
from tiers.local.documents import Documents, remove_durably
from tiers.local.layout import DIRECTORY_MODE, PAGE, parse_segment, replicas_in, tier_directory
from tiers.local.local_options import LocalOptions
from tiers.local.lock import DirectoryLock, contains, owner_of
from tiers.local.probes import nearest_existing, probe_directory

SCRATCH = ".kv-tiering-scratch-"
"""Begins the names of scratch directories. A later command removes those of commands that were killed."""

SCRATCH_SECONDS = 3600.0
"""Age in seconds from which on a scratch directory without an owner counts as left behind."""

_DAMAGED = (CorruptReason.HEADER, CorruptReason.CODEC)
"""Results for a damaged header; a slot without the format's first bytes is empty."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment file of any shape."""

    path: Path
    slot_bytes: int
    slots: int
    modified: float
    nbytes: int


class LocalAdmin(TierAdmin):
    """Administration of a local tier's directory.

    Segments, not single blocks, are removed: a slot without its segment would free no room.
    """

    header_bytes = PAGE

    def __init__(self, options: TierOptions, replica: str | None = None) -> None:
        super().__init__(options, replica)
        self.directory = tier_directory(self.options.path, replica)
        self._files = Files()
        self._documents = Documents(self.directory, self._files, DirectoryLock(self.directory))
        self._bases: dict[str, str] = {}

    @property
    def place(self) -> str:
        return str(self.directory)

    def replicas(self) -> Sequence[str]:
        return replicas_in(self.directory)

    def owner(self) -> str | None:
        with store_errors(f"cannot look at the lock of {self.directory}"):
            return owner_of(self.directory)

    def open(self) -> None:
        with store_errors(f"cannot look at {self.directory}"):
            existing, wrong = nearest_existing(self.directory)
        if wrong is not None:
            raise PermanentStoreError(f"{wrong.text}; {wrong.remedy}")
        if existing != self.directory:
            raise PermanentStoreError(f"{self.directory} does not exist: no engine has used this tier yet")

    def conflict(self, other: TierAdmin) -> str:
        if not isinstance(other, LocalAdmin):
            return ""
        one, two = self.directory, other.directory
        try:
            # A bind mount has the same inode under another path, which is not resolved.
            same = one.resolve() == two.resolve() or (one.exists() and two.exists() and one.samefile(two))
            nested = contains(one.resolve(), two.resolve())
        except (OSError, RuntimeError):
            return ""  # the check of the tier itself finds the reason
        if same:
            return f"{one} is the same directory as {two} of the tier {other.name}: an engine runs without this tier"
        if nested:
            return (
                f"one of {one} and {two} of the tier {other.name} contains the other: an engine runs without this tier"
            )
        return ""

    def check(self, block_bytes: int) -> Iterator[Finding]:
        if not Path(self.options.path).expanduser().is_absolute():
            text = (
                f"{self.options.path} is relative to the engine's working directory; from here it is {self.directory}"
            )
            yield Finding(Severity.WARNING, "path", text, "write an absolute path")
        yield from probe_directory(self.options, self.directory, block_bytes, self._files)

    @contextlib.contextmanager
    def scratch(self, capacity: int) -> Iterator[TierOptions | None]:
        parent = self.directory
        while not parent.is_dir():
            parent = parent.parent
        self._sweep(parent)
        self._check_space(parent, capacity)
        scratch = parent / f"{SCRATCH}{secrets.token_hex(4)}"
        with store_errors(f"cannot create {scratch}"):
            scratch.mkdir(mode=DIRECTORY_MODE)
        try:
            yield self.options.model_copy(update={"path": str(scratch), "capacity": capacity})
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def device_limit(self, block_bytes: int, depth: int, *, load: bool, nbytes: int, seconds: float) -> float | None:
        with self.scratch(nbytes) as options:
            if not isinstance(options, LocalOptions):
                return None
            directory = Path(options.path)
            with store_errors(f"cannot use {directory}"):
                direct = probe_direct(self._files, directory, None)
            return device_speed(
                directory, block_bytes + PAGE, depth, load=load, nbytes=nbytes, seconds=seconds, direct=direct
            )

    def _check_space(self, parent: Path, capacity: int) -> None:
        """Check that a scratch place leaves the disk usable.

        Raises:
            OutOfSpaceError: the disk has less room than ``capacity``.
            StoreError: the disk cannot be looked at.
        """
        with store_errors(f"cannot look at {parent}"):
            room = os.statvfs(parent)
        free = room.f_bavail * room.f_frsize
        if free < capacity:
            raise OutOfSpaceError(
                f"the scratch place needs {format_bytes(capacity)} of disk, and {parent} has {format_bytes(free)} free"
            )

    def _sweep(self, parent: Path) -> None:
        """Remove scratch directories of commands that were killed; younger ones may be in use."""
        for left in parent.glob(f"{SCRATCH}*"):
            with contextlib.suppress(OSError):
                if self.clock() - left.lstat().st_mtime > SCRATCH_SECONDS and owner_of(left) is None:
                    shutil.rmtree(left, ignore_errors=True)

    async def namespaces(self) -> list[KnownNamespace]:
        found = known_namespaces(await asyncio.to_thread(self._contents), ())
        live = self.owner() is not None
        if live:
            # The engine itself may serve the epoch that it began for itself by a reset.
            found = [
                replace(
                    namespace,
                    epochs={
                        name: EpochState.LEASED if state is EpochState.ABANDONED else state
                        for name, state in namespace.epochs.items()
                    },
                )
                for namespace in found
            ]
        self._bases = {fingerprint: namespace.name for namespace in found for fingerprint in namespace.epochs}
        return found

    async def blocks(self, after: str = "") -> AsyncIterator[StoredBlock]:
        await self.namespaces()
        self.unreadable = 0
        for segment in await asyncio.to_thread(self._segments):
            if after.partition(":")[0] > segment.path.name:
                continue
            for block in await asyncio.to_thread(self._scan, segment):
                if block.place > after:
                    yield block

    async def read(self, block: StoredBlock) -> memoryview | None:
        import aiofiles  # not needed to list the blocks

        name, _, slot = block.place.partition(":")
        shape = parse_segment(name)
        if shape is None:
            return None
        slot_bytes = shape[0]
        data = memoryview(bytearray(block.nbytes))
        try:
            async with aiofiles.open(self.directory / name, "rb", buffering=0) as file:
                await file.seek(int(slot) * slot_bytes)
                done = 0
                while done < len(data) and (count := await file.readinto(data[done:])):
                    done += count
                self._files.drop_cached(file.fileno(), int(slot) * slot_bytes, len(data))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error, f"cannot read slot {slot} of {name}") from error
        return data[:done]

    def _contents(self) -> dict[str, bytes]:
        """Return the content of each document of a namespace.

        Raises:
            StoreError: a document cannot be read. Without it, blocks that engines serve would count as abandoned, or
                stay in their epoch.
        """
        names = self._documents.names("")
        self.hot_keys = sum(name.startswith(HOT) and hint_namespace(name) is not None for name in names)
        self.descriptions = sum(name.startswith(DESCRIBED) and hint_namespace(name) is not None for name in names)
        found = {name: self._documents.read(name) for name in filter(namespace_of, names)}
        return {name: content for name, content in found.items() if content is not None}

    def _segments(self) -> list[_Segment]:
        found: list[_Segment] = []
        with store_errors(f"cannot list {self.directory}"), os.scandir(self.directory) as entries:
            for entry in entries:
                shape = parse_segment(entry.name)
                if shape is not None and entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append(_Segment(Path(entry.path), *shape[:2], status.st_mtime, status.st_blocks * 512))
        return sorted(found, key=lambda segment: segment.path.name)

    def _scan(self, segment: _Segment) -> list[StoredBlock]:
        """Return the blocks whose headers are intact, and count the slots whose headers are not."""
        found: list[StoredBlock] = []
        try:
            fd = self._files.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:
            return found
        except OSError as error:
            raise store_error(error, f"cannot read {segment.path}") from error
        try:
            page = memoryview(bytearray(HEADER_BYTES))
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            for slot in range(segment.slots):
                try:
                    count = self._files.preadv(fd, [page], slot * segment.slot_bytes)
                except OSError:
                    self.unreadable += 1  # A bad sector: an engine could not read this block either.
                    continue
                header = parse_header(page) if count == HEADER_BYTES else None
                self.unreadable += header in _DAMAGED
                if isinstance(header, FrameHeader) and PAGE + header.stored_length <= segment.slot_bytes:
                    fingerprint = header.fingerprint.hex()
                    found.append(
                        StoredBlock(
                            segment.modified,
                            f"{segment.path.name}:{slot:09d}",
                            PAGE + header.stored_length,
                            self._bases.get(fingerprint, ""),
                            fingerprint,
                        )
                    )
            self._files.drop_cached(fd, 0, 0)
        finally:
            self._files.close(fd)
        return found

    @contextlib.contextmanager
    def _owned(self, *, dry_run: bool = False) -> Iterator[None]:
        """Own the directory for a change, so that no engine opens it meanwhile."""
        if dry_run:
            yield
            return
        lock = DirectoryLock(self.directory)
        try:
            lock.acquire()
        except InUseError as error:
            raise InUseError(
                f"{self.directory} is in use by {self.owner() or 'another process'}; "
                "a directory in use is only read: stop the engine first"
            ) from error
        try:
            yield
        finally:
            lock.release()

    async def collect(self, limits: Limits, *, dry_run: bool) -> Collected:
        with self._owned(dry_run=dry_run):
            if not dry_run:
                await asyncio.to_thread(self._drop_hints, None)
            return await asyncio.to_thread(self._collect, limits, await self.used_epochs(), None, dry_run)

    async def clear(self, namespace: str, *, dry_run: bool) -> Collected:
        with self._owned(dry_run=dry_run):
            served = {name for name in await self.used_epochs() if self._bases.get(name) != namespace}
            if not dry_run:
                await self._begin_epoch(namespace, owned=True)
                await asyncio.to_thread(self._drop_hints, namespace)
            return await asyncio.to_thread(self._collect, Limits(), served, namespace, dry_run)

    def adopt(self, roots: Sequence[str], *, dry_run: bool) -> Iterator[Adopted]:
        places = dict.fromkeys(tier_directory(root, None) for root in roots)
        with store_errors(f"cannot adopt {', '.join(map(str, places))}"):
            yield from adopt(places, self.options.path, self._files, dry_run=dry_run)

    async def begin_epoch(self, namespace: str, invalidation: bytes) -> str | None:
        ended = await self._begin_epoch(namespace, owned=False)
        return "the next engine that opens the directory begins empty" if ended else None

    async def _begin_epoch(self, namespace: str, *, owned: bool) -> bool:
        """Remove the epoch document of a namespace, and return False if it has none.

        Args:
            namespace: base of the namespace as 32 hex digits.
            owned: True if the caller owns the directory.
        """
        ended = False
        with self._owned(dry_run=owned):
            for name, content in self._contents().items():
                epochs = {epoch for found in known_namespaces({name: content}, ()) for epoch in found.epochs}
                if namespace_of(name) == namespace and epochs:
                    self._bases.update(dict.fromkeys(epochs, namespace))
                    with store_errors(f"cannot remove the epoch document {name}"):
                        remove_durably(self._files, self.directory / "documents" / name)
                    ended = True
        return ended

    def _drop_hints(self, namespace: str | None) -> None:
        """Remove the hints of one namespace, or (None) those without use for any engine."""
        folder = self.directory / "documents"
        with store_errors(f"cannot remove documents in {folder}"):
            for prefix, seconds in ((HOT, HOT_SECONDS), (SPEEDS, SPEED_SECONDS), (DESCRIBED, math.inf)):
                for path in folder.glob(f"{prefix}*"):
                    named = hint_namespace(path.name)
                    unused = self.clock() - path.stat().st_mtime >= seconds
                    if prefix == DESCRIBED:
                        unused = named is not None and not (folder / f"{EPOCHS}{named}").exists()
                    if unused if namespace is None else named == namespace:
                        self._files.unlink(path)

    def _collect(self, limits: Limits, served: set[str], namespace: str | None, dry_run: bool) -> Collected:
        """Remove whole segments: those without a served block, then the oldest ones.

        Args:
            limits: blocks that go.
            served: fingerprints of the epochs that stay.
            namespace: remove segments that hold blocks of this namespace and no served ones (None: of none).
            dry_run: count only.
        """
        now = self.clock()
        segments = [(segment, self._scan(segment)) for segment in self._segments()]
        total = sum(segment.nbytes for segment, _ in segments)
        left = total
        gone: list[tuple[_Segment, list[StoredBlock]]] = []
        kept: list[tuple[_Segment, list[StoredBlock]]] = []
        for segment, blocks in segments:
            unserved = bool(blocks) and not any(block.fingerprint in served for block in blocks)
            old = limits.older_than is not None and now - segment.modified > limits.older_than
            cleared = namespace is not None and any(block.namespace == namespace for block in blocks)
            go = old or (unserved and (limits.abandoned or cleared))
            (gone if go else kept).append((segment, blocks))
            left -= segment.nbytes if go else 0
        for segment, blocks in sorted(kept, key=lambda item: item[0].modified):
            if limits.max_total is None or left <= limits.max_total:
                break
            left -= segment.nbytes
            gone.append((segment, blocks))
        if not dry_run:
            self._delete(gone, served)
        return Collected(
            sum(len(blocks) for _, blocks in segments), total, sum(len(blocks) for _, blocks in gone), total - left
        )

    def _delete(self, gone: Sequence[tuple[_Segment, list[StoredBlock]]], served: set[str]) -> None:
        with store_errors(f"cannot remove segments in {self.directory}"):
            if any(block.fingerprint in served for _, blocks in gone for block in blocks):
                # It names blocks that go. Without it, the next start reads all headers.
                self._files.unlink(self.directory / CHECKPOINT_NAME)
            for segment, blocks in gone:
                self._files.unlink(segment.path)
                self.removed_blocks += len(blocks)
                self.removed_bytes += segment.nbytes
            self._files.sync_directory(self.directory)
