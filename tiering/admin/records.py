"""Records of a tier's administration: findings, blocks, namespaces, limits and results of collections."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiering.errors import TieringError


class UnsupportedError(TieringError):
    """An administrative operation that a tier's medium does not have."""


class Severity(enum.StrEnum):
    """Weight of a finding."""

    OK = "ok"
    """The medium is as it should be."""
    INFO = "info"
    """A fact that explains how the tier will work."""
    WARNING = "warning"
    """The tier works, but slower, smaller or at a higher cost than the stack says."""
    ERROR = "error"
    """The tier will not work, or not store."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one probe."""

    severity: Severity
    """Weight of the finding."""
    subject: str
    """The part that was probed, in a few words: "O_DIRECT", "free space"."""
    text: str
    """The observation."""
    remedy: str = ""
    """The next step for the operator; default: none is needed."""


@dataclass(frozen=True, slots=True, order=True)
class StoredBlock:
    """A block on a medium. Sorting puts the oldest first."""

    modified: float
    """Time in seconds since 1970 after which the block was not written any more."""
    place: str
    """Text that identifies the block's place, for the tier's own methods."""
    nbytes: int
    """Bytes of the block on the medium: header and payload."""
    namespace: str = ""
    """Base of the namespace as 32 hex digits; empty (default) if the medium does not name it."""
    fingerprint: str = ""
    """Fingerprint of namespace and epoch as 32 hex digits; empty (default) if the medium does not name it."""


class EpochState(enum.StrEnum):
    """Relation of an epoch to the engines."""

    CURRENT = "current"
    """Engines that start now serve the epoch's blocks."""
    LEASED = "leased"
    """A running engine uses the epoch, and renews its lease."""
    ABANDONED = "abandoned"
    """No engine that starts now serves the epoch's blocks, and no lease is fresh."""


@dataclass(frozen=True, slots=True)
class KnownNamespace:
    """A namespace according to the documents on a medium."""

    name: str
    """Base of the namespace as 32 hex digits."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Readable parameters; empty (default) if their document is missing."""
    epochs: Mapping[str, EpochState] = field(default_factory=dict)
    """State of each epoch that a document or lease names, by fingerprint in hexadecimal."""
    holders: Mapping[str, str] = field(default_factory=dict)
    """Process that wrote the lease of each leased epoch last, by fingerprint in hexadecimal."""

    @property
    def label(self) -> str:
        """The model's name or the beginning of its weights' digest, and the data type, for people."""
        model = self.parameters.get("model")
        if not isinstance(model, Mapping):
            return "unknown model"
        user = f", user {self.parameters['user']}" if "user" in self.parameters else ""
        return f"{model.get('name') or str(model.get('weights', '?'))[:12]}, {model.get('dtype', '?')}{user}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Blocks that a collection removes. The limits add up; without any, nothing is removed."""

    abandoned: bool = False
    """True to remove the blocks of abandoned epochs that are older than ``grace``; default False."""
    older_than: float | None = None
    """Age in seconds above which a block is removed; None (default): no limit."""
    max_total: int | None = None
    """Bytes that may remain on the medium; None (default): no limit.

    The oldest blocks go. Of blocks that were written within about an hour, the tails of prefixes go before the heads.
    """
    grace: float = 86400.0
    """Age in seconds below which blocks and leases of abandoned epochs are kept; default: a day."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A place that an engine had before a machine's service took its tier over."""

    place: str
    """The place, for people."""
    namespace: str
    """Namespace that used it last, as 32 hex digits; empty if the place was not read."""
    nbytes: int
    """Bytes in it; 0 if it stays."""
    fate: str
    """Fate of the place, as the end of a sentence that begins with the place."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of a collection. A dry run counts the blocks that a real run would remove."""

    blocks: int = 0
    """Blocks that were listed."""
    nbytes: int = 0
    """Bytes of the listed blocks."""
    removed_blocks: int = 0
    """Blocks that were removed."""
    removed_bytes: int = 0
    """Bytes of the removed blocks."""
