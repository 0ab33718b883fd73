"""The size advisor of one manager: estimated hit rates at other capacities of its tiers.

The estimates come from the lookups that happen anyway. All tiers see the same lookups, and a tier also holds the blocks
of all faster tiers. So one sample serves all tiers: LRU's hit rate at a tier's capacity estimates the hits of the tier
and of all faster ones together. The estimate knows nothing of admission, of other eviction policies, or of stores that
a slow medium drops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct

import numpy as np

from tiering.advisor.shards import HASHES, SAMPLE, Shards
from tiering.api.keys import OffloadKey
from tiering.api.metric import Metric, MetricKind
from tiering.api.units import format_bytes

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Capacities of the estimates, as multiples of a tier's capacity."""

FIELDS: Mapping[float, str] = {
    factor: f"estimated_hit_ratio_x{format(factor, 'g').replace('.', '_')}" for factor in FACTORS
}
"""Factor → name of the estimate in a tier's statistics."""

ESTIMATES = tuple(
    Metric(
        MetricKind.GAUGE,
        "ratio",
        f"Estimated hit rate of the tier and all faster ones with {factor:g} times the tier's capacity",
        "Compare with that of the present capacity: the difference is what another size would bring.",
        f"kv_tiering_{name}",
        combined="avg",
        field=name,
    )
    for factor, name in FIELDS.items()
)
"""Metrics of the estimates; each estimate is a field of a tier's statistics."""

WINDOW = 1 << 24
"""Number of accesses after which all earlier ones count half."""

BRINGS_NOTHING = "an inclusive CPU tier that is not larger than the GPU's own cache brings nothing"
"""Why the estimates of such a tier stay near 0: the GPU serves the blocks itself."""

LEAST_FACTOR = 1.5
"""Multiple of the engine's own cache below which an inclusive CPU tier gets advice."""

_HASH_BYTES = 4

_ARRAY_KEYS = 12
"""Number of keys from which numpy is faster than a loop."""


def small_tier(capacity: int, own_bytes: int, *, leads_on: bool, exclusive: bool) -> str | None:
    """Return the advice on an inclusive CPU tier that mostly repeats the engine's own cache, or None.

    Args:
        capacity: bytes of the CPU tier.
        own_bytes: bytes of the KV caches of all the engine's devices, equal copies counted once.
        leads_on: True if there are secondary tiers.
        exclusive: True if the CPU tier prefers blocks that the engine's own cache does not hold.
    """
    if exclusive or capacity >= LEAST_FACTOR * own_bytes:
        return None
    why = "only what an inclusive CPU tier is larger by than the GPU's own cache brings hits"
    if capacity <= own_bytes:
        why = BRINGS_NOTHING + (" by itself: it only leads to the secondary tiers" if leads_on else "")
    sizes = f"{format_bytes(capacity)} of CPU memory for {format_bytes(own_bytes)} of KV cache"
    return f"{why} ({sizes}); set primary.inclusion: exclusive, or raise primary.capacity"


class SizeAdvisor:
    """Estimates of the hit rate of each tier at a quarter to sixteen times its capacity.

    The scheduler's thread calls all methods. A key's leading four bytes serve as its hash, because keys are hashes.

    Args:
        capacities: name of a tier → its capacity in blocks; tiers without a capacity are left out.
        sample: largest number of keys in the sample; default :data:`tiering.advisor.shards.SAMPLE`.
    """

    __slots__ = ("_capacities", "_leading", "_sample", "_shards")

    def __init__(self, capacities: Mapping[str, int], sample: int = SAMPLE) -> None:
        self._capacities = {
            name: [max(1, int(blocks * factor)) for factor in FACTORS] for name, blocks in capacities.items()
        }
        self._sample = sample
        self._shards = self._empty_shards()
        self._leading = Struct("<I")
        """Reader of the leading bytes of a key, for keys of one length; replaced for another length."""

    def _empty_shards(self) -> Shards:
        sizes = [size for scaled in self._capacities.values() for size in scaled]
        # More keys than the smallest capacity holds need not be sampled at the start, so that the start is cheap too.
        return Shards(sizes, self._sample, min(1.0, self._sample / min(sizes)) if sizes else 1.0)

    def exclude(self, tier: str, blocks: int) -> None:
        """Start over with a tier that holds other blocks than the engine's own cache.

        The two together hit like one cache of both sizes, and the lookups are those that the engine's cache missed.

        Args:
            tier: name of the tier.
            blocks: number of blocks that the engine's cache has room for.
        """
        if tier in self._capacities:
            self._capacities[tier] = [size + blocks for size in self._capacities[tier]]
            self._shards = self._empty_shards()

    @property
    def accesses(self) -> int:
        """Number of blocks looked up, each once per request; earlier lookups count less."""
        return self._shards.accesses

    def looked_up(self, counted: dict[int, int], keys: Sequence[OffloadKey]) -> None:
        """Record the lookup of a prefix.

        A request that waits looks its prefix up at every step, and all but its first lookup are ignored.

        Args:
            counted: number of keys recorded for the request so far, by KV-cache group; updated.
            keys: the prefix, of one group.
        """
        if not keys:
            return
        group = keys[0][-1]
        known = counted.get(group, 0)
        if len(keys) <= known:
            return
        counted[group] = len(keys)
        new = keys[known:] if known else keys
        self._shards.accesses += len(new)
        chosen = self._sampled(new)
        if chosen:
            self._shards.access(chosen)
        if self._shards.accesses >= WINDOW:
            self._shards.halve()

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Record that ``keys`` were stored: they become recent, and no lookup is counted."""
        chosen = self._sampled(keys)
        if chosen:
            self._shards.access(chosen, counted=False)

    def _sampled(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Return the hashes of the sampled ones of ``keys``; all keys have the same length."""
        width = len(keys[0])
        if width % _HASH_BYTES or len(keys) < _ARRAY_KEYS:
            threshold, leading = self._shards.threshold, self._leading
            if leading.size != width:
                leading = self._leading = Struct(f"<I{max(0, width - _HASH_BYTES)}x")
            return [value for (value,) in leading.iter_unpack(b"".join(keys)) if value < threshold]
        hashes = np.frombuffer(b"".join(keys), "<u4")[:: width // _HASH_BYTES]
        if self._shards.threshold == HASHES:
            chosen: list[int] = hashes.tolist()
        else:
            chosen = hashes[hashes < self._shards.threshold].tolist()
        return chosen

    def forget(self) -> None:
        """Start over: a reset has emptied all tiers."""
        self._shards.clear()

    def estimates(self, tier: str) -> dict[str, float]:
        """Return the estimated hit rates of ``tier`` and all faster ones, by the names in :data:`FIELDS`.

        Empty for a tier without a capacity, and before the first lookup.
        """
        if not self._shards.accesses or tier not in self._capacities:
            return {}
        sizes = self._capacities[tier]
        return {name: self._shards.hit_rate(size) for name, size in zip(FIELDS.values(), sizes, strict=True)}
