"""The tier of other engines' rows, as an engine's manager uses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.block_tier.definition import TierDefinition
from tiering.machine.admin import MachineAdmin
from tiering.machine.options import MachineTierOptions
from tiering.machine.tier import MachineTier
from tiering.secondary.contract import TierContext


class PeersTier(MachineTier):
    """The tier of the service that only loads: it has what other engines report about their rows.

    It sends no notices, and announces no blocks: they come and go with the requests of other engines.

    Args:
        context: environment of the tier.
        options: options of the tier.
    """

    def __init__(self, context: TierContext, options: MachineTierOptions) -> None:
        super().__init__(replace(context, enable_events=False), options)
        self.traits = replace(self.traits, fill=False, hot_keys=None)

    def admit(self, keys: Sequence[OffloadKey], req_context: ReqContext, is_fill: bool) -> Sequence[int]:
        return ()

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        """Send nothing: the engines whose rows have the blocks decide on their evictions."""

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        return math.inf

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        """Send nothing, as :meth:`touch`."""


PEERS_DEFINITION = TierDefinition(
    options=MachineTierOptions,
    build=lambda options, context: PeersTier(context, options),
    persistent=True,
    admin=MachineAdmin,
)
