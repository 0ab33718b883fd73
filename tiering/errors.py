"""The errors this project raises: what went wrong, and whether trying again can help.

Every error is a :class:`TieringError`.  ``temporary`` is the only thing that code may decide on; the text is for people
and says what to do.
"""

from __future__ import annotations

from typing import ClassVar


class TieringError(Exception):
    """Base of every error raised by this project.

    ``temporary`` is True when the same call may succeed later without anybody changing anything.
    """

    temporary: ClassVar[bool] = False


class ConfigError(TieringError, ValueError):
    """A stack, an engine configuration or an argument is wrong.  Raised before anything is opened."""


class NotReadableError(TieringError, KeyError):
    """A key was to be loaded that is not readable in the primary tier.  Nothing was pinned.

    ``keys`` are those that are not readable.
    """

    def __init__(self, keys: list[bytes]) -> None:
        super().__init__(f"{len(keys)} key(s) are not readable in the primary tier, first: {keys[0].hex()}")
        self.keys = keys

    def __str__(self) -> str:
        return str(self.args[0])


class RegionError(TieringError):
    """The shared memory region cannot be created or mapped; the text says which limit to raise."""


class TierUnavailableError(TieringError):
    """A tier that is marked ``required`` cannot be opened."""


class WrongThreadError(TieringError, RuntimeError):
    """A manager was used by a second thread while the first one, which owns it, is alive.  Nothing was done."""


class StoreError(TieringError):
    """A block store could not do what it was asked.  One of its two children says whether to try again."""


class TemporaryStoreError(StoreError):
    """Throttling, resets, time-outs, a full queue: the same request may succeed later."""

    temporary: ClassVar[bool] = True


class PermanentStoreError(StoreError):
    """Refused for good: no permission, no such bucket, no space, an invalid name, a broken device."""


class WritesRefusedError(PermanentStoreError):
    """The medium takes no writes for the time being.  It is not an outage: the tier goes on serving what it holds."""


class OutOfSpaceError(WritesRefusedError):
    """The medium is full, or its quota is used up."""


class ReadOnlyError(WritesRefusedError):
    """The file system is mounted read-only, which also happens when its device reports an error."""


class DeviceError(PermanentStoreError):
    """The device reports an error at the place of one block.

    It concerns that place and not the medium: the block is dropped, and its place is taken out of use.
    """


class InUseError(PermanentStoreError):
    """Another process owns the medium.  The tier asks again at short intervals, so that it takes over soon after the owner's end."""


class PlaceLostError(PermanentStoreError):
    """The medium does not have the place of a block any more: somebody removed its file.  It is not an outage."""


class CorruptBlockError(PermanentStoreError):
    """What the medium returned is not the block that was asked for.  The block is dropped and counted as a miss."""


class OverdueError(TemporaryStoreError):
    """The deadline of the job passed before this block's I/O was started, or finished."""
