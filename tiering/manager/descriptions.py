"""The descriptions of one tier's blocks, as the manager lets its caller use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

from tiering.api.descriptions import Described, Description, TierDescriptions
from tiering.manager.answers import TRUTH, Answer, BreachError
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers

_T = TypeVar("_T")

MOST_DOCUMENTS = 128
"""Largest number of documents that are taken from a tier."""


class GuardedDescriptions(TierDescriptions):
    """The descriptions of a tier, which goes out of service if its part raises or breaks its contract.

    Args:
        tiers: the secondary tiers.
        state: the tier.
        part: the tier's part.
    """

    def __init__(self, tiers: SecondaryTiers, state: TierState, part: TierDescriptions) -> None:
        self._tiers = tiers
        self._state = state
        self._part = part
        self.tier = state.name
        self.slots = min(max(2, part.slots), MOST_DOCUMENTS)

    @property
    def writing(self) -> bool:
        """True while the tier writes documents."""
        return self._part.writing

    @classmethod
    def of(cls, tiers: SecondaryTiers) -> GuardedDescriptions | None:
        """Return the descriptions of the first tier that keeps any; None without one."""
        for state in tiers.states:
            if state.traits.descriptions is not None:
                return cls(tiers, state, state.traits.descriptions)
        return None

    def write(self, documents: Sequence[Description]) -> bool:
        return self._state.in_service and bool(self._tiers.ask(self._state, TRUTH, self._part.write, documents))

    def gather(self, read: Callable[[bytes], _T]) -> Sequence[Described[_T]] | None:
        if not self._state.in_service:
            return None
        return self._tiers.ask(self._state, DOCUMENTS, self._part.gather, read)


def _documents(answer: Any, *_: object) -> list[Described[Any]] | None:
    if answer is None:
        return None
    documents = list(islice(answer, MOST_DOCUMENTS))
    if not all(isinstance(document, Described) for document in documents):
        raise BreachError
    return documents


DOCUMENTS = Answer("None or the documents that it has read", _documents)
