"""The errors of this project; each says what failed and whether a retry can help.

Every error is a :class:`TieringError`. Code decides on ``temporary`` alone; the text is for people and says what to do.
"""

from __future__ import annotations

from typing import ClassVar


class TieringError(Exception):
    """Base class of every error that this project raises."""

    temporary: ClassVar[bool] = False
    """True if the same call may succeed later without any change to the setup."""


class ConfigError(TieringError, ValueError):
    """An invalid stack, engine configuration or argument, or a KV cache that cannot be offloaded.

    A stack is refused before anything is opened. The layout of a KV cache is known only to the workers, which refuse it
    while the engine starts, after the model's weights were loaded.
    """


class NotReadableError(TieringError, KeyError):
    """A load of keys that are not readable in the primary tier. No row was pinned."""

    def __init__(self, keys: list[bytes]) -> None:
        super().__init__(f"{len(keys)} key(s) are not readable in the primary tier, first: {keys[0].hex()}")
        self.keys = keys
        """The keys that are not readable."""

    def __str__(self) -> str:
        return str(self.args[0])


class RegionError(TieringError):
    """A shared memory region that cannot be created or mapped; the text names the limit to raise."""


class TierUnavailableError(TieringError):
    """A tier marked ``required`` that cannot be opened."""


class WrongThreadError(TieringError, RuntimeError):
    """A call from a second thread while the manager's owner thread is alive. The call changed nothing."""


class StoreError(TieringError):
    """A failed operation of a block store. Its two subclasses say whether a retry can help."""


class TemporaryStoreError(StoreError):
    """A failure that may pass: throttling, connection resets, time-outs, a full queue."""

    temporary: ClassVar[bool] = True


class PermanentStoreError(StoreError):
    """A failure that a retry cannot cure: no permission, no space, an invalid name, a broken device."""


class WritesRefusedError(PermanentStoreError):
    """A medium that takes no writes at present.

    This is no outage: the tier goes on serving the blocks it holds.
    """


class OutOfSpaceError(WritesRefusedError):
    """A full medium, or an exhausted quota."""


class ReadOnlyError(WritesRefusedError):
    """A read-only file system.

    Linux also remounts a file system read-only when its device reports an error.
    """


class DeviceError(PermanentStoreError):
    """A device error at the place of one block.

    Only that place is affected, not the medium: the tier drops the block and takes its place out of use.
    """


class InUseError(PermanentStoreError):
    """A medium that another process owns.

    The tier retries at short intervals and takes over soon after the owner exits.
    """


class PlaceLostError(PermanentStoreError):
    """A block whose place is gone from the medium, for example because its file was deleted.

    This is no outage.
    """


class CorruptBlockError(PermanentStoreError):
    """Bytes from the medium that are not the requested block. The tier drops the block and counts a miss."""


class OverdueError(TemporaryStoreError):
    """A block whose I/O was not started or not finished before the deadline of its job."""
