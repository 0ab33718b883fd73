"""One secondary tier, as the manager treats it, and the check of the traits that the tier declares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from tiering.api.descriptions import TierDescriptions
from tiering.api.misses import Refusal
from tiering.errors import ConfigError
from tiering.manager.answers import BreachError, text_of, truth
from tiering.manager.cascade_queue import CascadeQueue
from tiering.manager.load_gate import LoadGate
from tiering.manager.worth import Worth
from tiering.secondary.contract import (
    SecondaryTierManager,
    TierHotKeys,
    TierIntake,
    TierTraits,
    TransferJob,
)
from tiering.secondary.speeds import LoadOrCompute, TierSpeeds

_T = TypeVar("_T")

TAKES_ALL = TierIntake()
"""The contract's own intake, by which a tier gets all blocks at once: its answers are known."""


@dataclass(slots=True, eq=False)
class TierState:
    """One secondary tier, as the manager treats it."""

    tier: SecondaryTierManager
    rank: int
    """Position among the secondary tiers; 0 is the fastest."""
    name: str
    traits: TierTraits
    """Traits of the tier as they were at the start, each with a value that the contract allows."""
    loads: bool
    """False if no request loads from the tier."""
    gate: LoadGate | None
    """Chooses between loads from the tier and computing; None: no choice."""
    max_loading_rows: int
    """Largest number of primary rows that the tier's loads may hold."""
    settled_until: NDArray[np.float64]
    """Per primary row, the time until which uses of its block need not be reported to the tier.

    The tier holds the block until then, or has decided not to take it.
    """
    has: NDArray[np.bool_]
    """Per primary row, True if the tier has stored or loaded its block.

    The value has no meaning beyond ``settled_until``. A tier that has settled a block otherwise may have declined it.
    """
    intake: TierIntake
    """Part of the tier that chooses its blocks; :data:`TAKES_ALL` if the tier has none."""
    worth: Worth | None = None
    """Measured worth of the tier; None: it is not measured."""
    queue: CascadeQueue = field(default_factory=CascadeQueue)
    """Readable blocks that wait for the tier's credit."""
    jobs: dict[int, TransferJob] = field(default_factory=dict)
    """Jobs that the tier has not reported, by number; the rows of its stores are pinned."""
    credit: int = 0
    """Number of blocks that may be submitted before the tier is called again.

    It is 0 between the stores of two steps.
    """
    queued_since: float = -math.inf
    """Time of the last pull, or at which an empty queue got blocks, on the manager's clock."""
    in_service: bool = True
    """True if the manager may call the tier and submit jobs to it."""
    resetting: bool = False
    """True if the tier is out of service only until its medium has confirmed a reset."""
    loading_rows: int = 0
    """Primary rows that the tier's loads hold, overdue loads included; at most ``max_loading_rows``."""
    cascading_rows: int = 0
    """Primary rows of the cascades that were submitted; a row counts once for each of them."""
    cascade_ended: float = -math.inf
    """Time at which the last cascade to the tier ended, on the manager's clock."""
    load_ended: float = -math.inf
    """Time at which the last load from the tier ended, on the manager's clock."""

    @property
    def serves_all(self) -> bool:
        """True if a block of the tier needs no row: it stays as long, and each request that finds it loads it."""
        outlasts = (self.traits.capacity_blocks or 0) >= len(self.has)
        return outlasts and self.loads and self.gate is None and self.traits.min_prefix_blocks <= 1

    def lateness(self, deadline: float) -> Refusal:
        """Return the reason why blocks of a load are misses that has not ended at its ``deadline``."""
        begun = deadline - (self.traits.load_deadline or 0.0)
        return Refusal.LATE if self.load_ended >= begun else Refusal.HUNG

    def begin_load(self, blocks: int, now: float) -> None:
        """Record that requests wait for a load of ``blocks``."""
        self.loading_rows += blocks
        if self.gate is not None:
            self.gate.begin(blocks, now)

    def await_fewer(self, blocks: int) -> int:
        """Record that requests wait for ``blocks`` fewer, and return that number."""
        if self.gate is not None:
            self.gate.awaited -= blocks
        return blocks

    def drop_load(self, blocks: int, now: float) -> None:
        """Record that a load of ``blocks`` is not submitted."""
        self.loading_rows -= blocks
        if self.gate is not None:
            self.gate.end(blocks, 0, now)

    @classmethod
    def of(cls, tier: SecondaryTierManager, rank: int, num_rows: int) -> Self:
        """Return the state of a tier that is in service and holds nothing.

        Args:
            tier: the tier.
            rank: position among the secondary tiers; 0 is the fastest.
            num_rows: number of primary rows.

        Raises:
            ConfigError: an attribute of the tier has a value that its contract does not allow.
        """
        given = _attribute(tier, tier, "traits", "a TierTraits", partial(_instance, TierTraits))
        traits = TierTraits(**{word: _attribute(tier, given, word, *rule) for word, rule in _RULES.items()})
        return cls(
            tier,
            rank,
            name=_attribute(tier, tier, "name", "a text", partial(_instance, str)),
            traits=traits,
            loads=traits.load_or_compute != "never",
            gate=LoadGate() if traits.load_or_compute == "auto" else None,
            max_loading_rows=max(1, int(traits.primary_share * num_rows)),
            settled_until=np.zeros(num_rows),
            has=np.zeros(num_rows, np.bool_),
            intake=TAKES_ALL if traits.intake is None else traits.intake,
        )


def _attribute(tier: SecondaryTierManager, owner: object, name: str, expected: str, read: Callable[[Any], _T]) -> _T:
    """Return an attribute of a tier or of its traits.

    Args:
        tier: the tier.
        owner: the object with the attribute.
        name: name of the attribute.
        expected: description of the allowed values.
        read: function that converts the value, and raises anything if the value is not allowed.

    Raises:
        ConfigError: the attribute does not exist, or its value is not allowed.
    """
    value: object = None
    try:
        value = getattr(owner, name)
        return read(value)
    except Exception as error:
        raise ConfigError(
            f"a {type(tier).__name__}, which is a secondary tier: its attribute {name} is {text_of(value)}, "
            f"but must be {expected}"
        ) from error


def _instance(kind: type[_T], value: object) -> _T:
    if not isinstance(value, kind):
        raise BreachError
    return value


def _part(kind: type[_T], value: object) -> _T | None:
    return None if value is None else _instance(kind, value)


def _share(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise BreachError
    return float(value)


def _limit(value: float | None) -> float | None:
    if value is None:
        return None
    if not value > 0.0:
        raise BreachError
    return float(value)


def _rule(value: str) -> str:
    if value not in get_args(LoadOrCompute):
        raise BreachError
    return value


def _count(value: int) -> int:
    if not index(value) > 0:
        raise BreachError
    return index(value)


def _optional_count(value: int | None) -> int | None:
    return None if value is None else _count(value)


_SECONDS, _COUNT = "a positive number of seconds or None", "a positive whole number"
_RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "medium": ("a text", partial(_instance, str)),
    "load_deadline": (_SECONDS, _limit),
    "store_deadline": (_SECONDS, _limit),
    "primary_share": ("a number from 0 to 1", _share),
    "max_load_blocks": (f"{_COUNT} or None", _optional_count),
    "min_prefix_blocks": (_COUNT, _count),
    "fill": ("True or False", truth),
    "mixes_requests": ("True or False", truth),
    "intake": ("a TierIntake or None", partial(_part, TierIntake)),
    "hot_keys": ("a TierHotKeys or None", partial(_part, TierHotKeys)),
    "descriptions": ("a TierDescriptions or None", partial(_part, TierDescriptions)),
    "speeds": ("a TierSpeeds or None", partial(_part, TierSpeeds)),
    "load_or_compute": ("auto, always or never", _rule),
    "capacity_blocks": (f"{_COUNT} or None", _optional_count),
}
"""Per trait that the manager keeps, the allowed values and the function that reads one."""
