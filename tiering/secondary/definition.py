"""How a medium makes itself known to the framework: its options and how to build a tier from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiering.secondary.contract import Distance, SecondaryTierManager, TierContext
from tiering.secondary.options import TierOptions


@dataclass(frozen=True, slots=True)
class TierDefinition:
    """A type of tier.

    ``options``: what its section of the stack file may say.  ``build(options, context)`` makes the tier without opening
    anything. ``persistent``: blocks outlive the process, so the model's identity must be able to vouch for them.
    ``location(options)``: what two tiers of one stack must not share (None: nothing); it looks at no medium.
    ``distance``: of the medium, for KV events, and for a warning when a stack does not list its tiers fastest first
    (None: not known).
    """

    options: type[TierOptions]
    build: Callable[[Any, TierContext], SecondaryTierManager]
    persistent: bool
    location: Callable[[Any], str | None] = lambda options: None
    distance: Distance | None = None
