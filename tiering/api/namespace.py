"""The namespace: a fingerprint of everything that determines the bytes and the meaning of a block.

Configurations that differ in any parameter never read each other's blocks, on any tier: every frame carries the
fingerprint, and object names on shared media contain it. The reset epoch is part of the namespace, so a new epoch
invalidates all older blocks.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tiering.errors import ConfigError

FORMAT_VERSION = 2
"""Version of the block frame and of the formats around it; part of every namespace."""

EPOCH_BYTES = 16
"""Length of an epoch in bytes."""

NO_EPOCH = bytes(EPOCH_BYTES)
"""Epoch of a namespace that no tier has entered yet. No block is ever stored in this epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The layout of an engine's KV in a block.

    No field has a default, because an omitted field could not tell two layouts apart.
    """

    kv_dtype: str
    """Data type of the cache, KV quantisation included (e.g. "bfloat16", "fp8_e4m3")."""
    layer_names: tuple[str, ...]
    """Names of all layers that have KV."""
    groups: tuple[str, ...]
    """One readable description per KV-cache group: kind, layers, window, head geometry."""
    gpu_block_size: tuple[int, ...]
    """Size of a GPU block in tokens, per KV-cache group."""
    block_size_factor: int
    """Number of GPU blocks in one offloaded block."""
    group_bytes: tuple[int, ...]
    """Size of an offloaded block in bytes, per KV-cache group, without padding."""
    memory_order: str
    """Order of dimensions in a page (e.g. "NHD", "HND"), and the index of the block dimension."""
    parallel_sizes: tuple[tuple[str, int], ...]
    """Name and size of each kind of parallelism: ("tensor", 2), ("pipeline", 1), ..."""
    hash_algorithm: str
    """Name of the algorithm that computes block hashes."""
    hash_seed: str
    """Seed of the block hashes; "random" if it differs between processes.

    Persistent tiers then refuse the model.
    """
    hash_block_size: int
    """Number of tokens that one block hash covers."""


_COMMIT_OR_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,}(?![0-9a-f])")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The identity of the model and engine that computed the KV.

    Raises:
        ConfigError: ``name``, ``weights``, ``dtype`` or ``layout`` is empty or of the wrong type.
    """

    name: str
    """Readable name. Part of the namespace only if ``weights`` is neither a commit nor a digest.

    Commits and digests have 32 hex digits or more. The same weights share their blocks under any name or path.
    """
    weights: str
    """A commit revision, or a digest of config and weight files.

    Never just a name: weights change under a name.
    """
    dtype: str
    """Data type of the computation."""
    layout: KVLayout | str
    """A :class:`KVLayout`; or, for other engines' layouts, any text that changes with the layout."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Configuration that changes results, such as rope scaling; plain data."""
    volatile_scales: bool = False
    """True if KV scales change at run time and live outside the block.

    Persistent tiers refuse such a model.
    """

    def __post_init__(self) -> None:
        for word in ("name", "weights", "dtype"):
            value = getattr(self, word)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"ModelIdentity.{word}: {value!r}: must be a non-empty string, e.g. a commit id")
        if not isinstance(self.layout, KVLayout) and (not isinstance(self.layout, str) or not self.layout):
            raise ConfigError(f"ModelIdentity.layout: {self.layout!r} is neither a KVLayout nor a text")

    @property
    def persistent_reason(self) -> str | None:
        """The reason why blocks of this model must not outlive the process, or None if they may."""
        if self.volatile_scales:
            return (
                "its KV scales change at run time and are not part of a block; "
                "use static scales, or an unquantised KV cache"
            )
        if isinstance(self.layout, KVLayout) and self.layout.hash_seed == "random":
            return (
                f"the block hashes of {self.layout.hash_algorithm} are seeded at random in each process; "
                "set PYTHONHASHSEED to a fixed number, or use sha256"
            )
        return None

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the namespace in readable form, as JSON-able data."""
        layout: Any = asdict(self.layout) if isinstance(self.layout, KVLayout) else self.layout
        return {
            **({} if _COMMIT_OR_DIGEST.search(self.weights) else {"name": self.name}),
            "weights": self.weights,
            "dtype": self.dtype,
            "layout": layout,
            "overrides": dict(self.overrides),
        }


@dataclass(frozen=True, slots=True)
class Namespace:
    """The parameters of a namespace and its present epoch."""

    parameters: str
    """The parameters as canonical JSON."""
    epoch: bytes = NO_EPOCH
    """The present epoch, :data:`EPOCH_BYTES` long."""
    base: bytes = b""
    """Digest of the parameters, 16 bytes; default: computed from them. Resets do not change it."""
    fingerprint: bytes = field(init=False)
    """Digest of the parameters and the epoch, 16 bytes. Every frame carries it."""

    def __post_init__(self) -> None:
        if not self.base:
            object.__setattr__(self, "base", hashlib.sha256(self.parameters.encode()).digest()[:16])
        object.__setattr__(self, "fingerprint", fingerprint_of(self.base, self.epoch))

    @classmethod
    def build(
        cls, model: ModelIdentity, group_bytes: tuple[int, ...], *, namespace: str = "", salt: str = ""
    ) -> Namespace:
        """Return the namespace of a model.

        Args:
            model: identity of the model.
            group_bytes: size of an offloaded block in bytes, per KV-cache group.
            namespace: the user's own text that keeps blocks apart; default empty.
            salt: like ``namespace`` but secret; only its digest enters the namespace.

        Raises:
            ConfigError: ``model.overrides`` is not plain data.
        """
        parameters = {
            "format": FORMAT_VERSION,
            "model": model.parameters(),
            "group_bytes": list(group_bytes),
            "namespace": namespace,
            "salt": hashlib.sha256(salt.encode()).hexdigest() if salt else "",
        }
        try:
            return cls(json.dumps(parameters, sort_keys=True, separators=(",", ":")))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"ModelIdentity.overrides: not plain data: {error}") from error

    @classmethod
    def named(cls, directory: str) -> Namespace:
        """Return the namespace of the name ``directory``, 32 hex digits, whose parameters are not known."""
        return cls("", base=bytes.fromhex(directory))

    @property
    def settings(self) -> str:
        """The parameters that are known before a tier opens: dtype and layout are; weights may be missing."""
        return self.parameters

    @property
    def directory(self) -> str:
        """``base`` as a name in paths and object names: 32 hex digits."""
        return self.base.hex()

    def with_epoch(self, epoch: bytes) -> Namespace:
        """Return the same parameters in another epoch."""
        return replace(self, epoch=epoch)

    def next_epoch(self) -> Namespace:
        """Return the same parameters in a new random epoch, which no other process has."""
        return self.with_epoch(secrets.token_bytes(EPOCH_BYTES))

    def revision_epoch(self, revision: str) -> Namespace:
        """Return the same parameters in the epoch that all engines with the same text ``revision`` share.

        Raises:
            ConfigError: ``revision`` is not a text, or is empty.
        """
        return self.with_epoch(
            hashlib.sha256(b"revision" + self.base + revision_digest(revision)).digest()[:EPOCH_BYTES]
        )


class PendingNamespace(Namespace):
    """A namespace whose parameters are still being determined; only its epoch is known.

    Args:
        known: function that returns the namespace, or raises a :class:`~tiering.errors.StoreError` while that is not
            known. It may block, and is called on the I/O side of tiers.
        settings: the parameters without those that are not known yet.
        epoch: the epoch; default: none.
    """

    __slots__ = ("_known", "_settings")
    _known: Callable[[], Namespace]
    _settings: str

    def __init__(self, known: Callable[[], Namespace], settings: str, epoch: bytes = NO_EPOCH) -> None:
        object.__setattr__(self, "_known", known)
        object.__setattr__(self, "_settings", settings)
        object.__setattr__(self, "epoch", epoch)

    @property
    def parameters(self) -> str:
        return self._known().parameters

    @property
    def base(self) -> bytes:
        return self._known().base

    @property
    def fingerprint(self) -> bytes:
        return fingerprint_of(self.base, self.epoch)

    def with_epoch(self, epoch: bytes) -> Namespace:
        return PendingNamespace(self._known, self._settings, epoch)

    @property
    def settings(self) -> str:
        return self._settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PendingNamespace) and (self._known, self.epoch) == (other._known, other.epoch)

    def __hash__(self) -> int:
        return hash((self._known, self.epoch))


def fingerprint_of(base: bytes, epoch: bytes) -> bytes:
    """Return the 16-byte fingerprint of the namespace ``base`` in ``epoch``, as frames carry it."""
    return hashlib.sha256(base + epoch).digest()[:16]


def service_replica(name: str) -> str:
    """Return the replica whose place a machine's service uses for a namespace.

    Args:
        name: the namespace as 32 hex digits.
    """
    return name[:16]


def revision_digest(revision: str) -> bytes:
    """Return the 16-byte digest of the text ``revision``.

    Raises:
        ConfigError: ``revision`` is not a text, or is empty.
    """
    if not isinstance(revision, str) or not revision.strip():
        raise ConfigError(f"revision: {revision!r} is not a text that names the weights")
    try:
        data = revision.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"revision: {revision[:60]!a} holds characters that are no UTF-8 text") from None
    return hashlib.sha256(data).digest()[:16]
