"""Definition of a type of tier: its options, and the function that builds a tier from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiering.admin.tier_admin import TierAdmin
from tiering.secondary.contract import Distance, SecondaryTierManager, TierContext
from tiering.secondary.options import TierOptions


@dataclass(frozen=True, slots=True)
class TierDefinition:
    """Options, store and tier class of one ``type`` word of a stack file."""

    options: type[TierOptions]
    """Class of the options that the tier's section of the stack file may contain."""
    build: Callable[[Any, TierContext], SecondaryTierManager]
    """Function ``build(options, context)`` that returns the tier without opening anything."""
    persistent: bool
    """True if blocks outlive the process; the model's identity must then be able to vouch for them."""
    location: Callable[[Any], str | None] = lambda options: None
    """Function ``location(options)``: text that two tiers of one stack must not share.

    None (default): no such text. The function does not access the medium.
    """
    distance: Distance | None = None
    """Distance of the medium; None (default): not known.

    KV events contain the distance. A warning uses it when a stack does not list its tiers fastest first.
    """
    needs_revision: str = ""
    """Reason why a stack with such a tier must have a ``revision``; empty (default): there is none."""
    admin: Callable[[Any, str | None], TierAdmin] = TierAdmin
    """Function ``admin(options, replica)`` that returns the tier's administration for the command line.

    The default supports no operation. ``replica`` is the name of a data-parallel replica, or None.
    """
