"""The namespace: a fingerprint of everything that changes the bytes of a block or their meaning.

Two configurations that differ in any of it never read each other's blocks, on any tier: every frame carries the
fingerprint, and shared media have it in their object names.  The reset epoch is part of it: a new epoch makes
everything older foreign.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tiering.errors import ConfigError

FORMAT_VERSION = 2
"""Version of the frame and of what surrounds it; part of every namespace."""

EPOCH_BYTES = 16

NO_EPOCH = bytes(EPOCH_BYTES)
"""The epoch of a namespace that no tier has entered yet.  No block is ever stored in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How an engine lays KV out in a block.  Nothing has a default: what is left out could not tell two layouts apart."""

    kv_dtype: str
    """Data type of the cache, KV quantisation included (e.g. "bfloat16", "fp8_e4m3")."""
    layer_names: tuple[str, ...]
    groups: tuple[str, ...]
    """One readable description per KV-cache group: kind, layers, window, head geometry."""
    gpu_block_size: tuple[int, ...]
    block_size_factor: int
    group_bytes: tuple[int, ...]
    memory_order: str
    """Order of dimensions in a page (e.g. "NHD", "HND"), and which dimension the blocks are."""
    parallel_sizes: tuple[tuple[str, int], ...]
    """("tensor", 2), ("pipeline", 1), ("decode_context", 1), ..."""
    hash_algorithm: str
    hash_seed: str
    """The seed of the block hashes; "random" if it differs from process to process (persistent tiers then refuse)."""
    hash_block_size: int


_COMMIT_OR_DIGEST = re.compile(r"(?<![0-9a-f])[0-9a-f]{32,}(?![0-9a-f])")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What computed the KV.

    ``weights``: a commit revision, or a digest of config and weight files; never just a name, since weights change
    under a name. ``name``: for people.  It is part of the namespace only where ``weights`` is neither a commit nor a
    digest, which have 32 hex digits or more: the same weights under another name or path share their blocks. ``dtype``:
    of the computation.  ``layout``: a :class:`KVLayout`, or, for callers whose layout is their own, any text that
    changes whenever it does.  ``overrides``: configuration that changes results (rope scaling and the like).
    ``volatile_scales``: KV scales that change at run time and live outside the block; persistent tiers refuse such a
    model.
    """

    name: str
    weights: str
    dtype: str
    layout: KVLayout | str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    volatile_scales: bool = False

    def __post_init__(self) -> None:
        for word in ("name", "weights", "dtype"):
            value = getattr(self, word)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"ModelIdentity.{word}: {value!r} is not a text that identifies something")
        if not isinstance(self.layout, KVLayout) and (not isinstance(self.layout, str) or not self.layout):
            raise ConfigError(f"ModelIdentity.layout: {self.layout!r} is neither a KVLayout nor a text")

    @property
    def persistent_reason(self) -> str | None:
        """Why blocks of this model must not outlive the process, or None if they may."""
        if self.volatile_scales:
            return "its KV scales change at run time and are not part of a block; use static scales, or an unquantised KV cache"
        if isinstance(self.layout, KVLayout) and self.layout.hash_seed == "random":
            return (
                f"the block hashes of {self.layout.hash_algorithm} are seeded at random in each process; "
                "set PYTHONHASHSEED to a fixed number, or use sha256"
            )
        return None

    def parameters(self) -> dict[str, Any]:
        """The readable parameters, as JSON-able data."""
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
    """The parameters of a namespace and its present epoch.

    ``base`` (16 bytes) identifies the parameters, the same over resets; ``fingerprint`` (16 bytes) covers the epoch too
    and is what frames carry.
    """

    parameters: str
    """Canonical JSON."""
    epoch: bytes = NO_EPOCH
    base: bytes = field(init=False)
    fingerprint: bytes = field(init=False)

    def __post_init__(self) -> None:
        base = hashlib.sha256(self.parameters.encode()).digest()[:16]
        object.__setattr__(self, "base", base)
        object.__setattr__(self, "fingerprint", fingerprint_of(base, self.epoch))

    @classmethod
    def build(
        cls, model: ModelIdentity, group_bytes: tuple[int, ...], *, namespace: str = "", salt: str = ""
    ) -> Namespace:
        """The namespace of ``model`` with blocks of ``group_bytes``, and the user's own ``namespace`` and ``salt``.

        Raises :class:`ConfigError` if ``model.overrides`` is not plain data.
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

    @property
    def directory(self) -> str:
        """A name for ``base`` in paths and object names: 32 hex digits."""
        return self.base.hex()

    def with_epoch(self, epoch: bytes) -> Namespace:
        """The same parameters in another epoch."""
        return replace(self, epoch=epoch)

    def next_epoch(self) -> Namespace:
        """The same parameters in a new random epoch, which nobody else has."""
        return self.with_epoch(secrets.token_bytes(EPOCH_BYTES))

    def revision_epoch(self, revision: str) -> Namespace:
        """The same parameters in the epoch that everybody has who gives the same text ``revision``.

        Raises :class:`ConfigError` for a revision that is not a text with something in it.
        """
        return self.with_epoch(
            hashlib.sha256(b"revision" + self.base + revision_digest(revision)).digest()[:EPOCH_BYTES]
        )


def fingerprint_of(base: bytes, epoch: bytes) -> bytes:
    """The fingerprint (16 bytes) of the namespace ``base`` in ``epoch``: what the frames of its blocks carry."""
    return hashlib.sha256(base + epoch).digest()[:16]


def revision_digest(revision: str) -> bytes:
    """Digest of the text ``revision``: 16 bytes.  Raises :class:`ConfigError` for what is not a text, or has nothing in it."""
    if not isinstance(revision, str) or not revision.strip():
        raise ConfigError(f"revision: {revision!r} is not a text that names the weights")
    return hashlib.sha256(revision.encode()).digest()[:16]
