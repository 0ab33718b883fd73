"""The causes of the misses of a replay, by the explainer of an engine.

A trace has no tokens, adapters, salts or request parameters, media are never corrupt, and there are no controls. So the
causes ``not_allowed``, ``other_adapter``, ``load_failed`` and ``lost`` by damage, the reasons ``failed`` and
``control``, and the token in which prompts differ are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiering.api.engine import MissExplaining
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.request import ReqContext
from tiering.config.stack_file import StackConfig
from tiering.explain.explainer import Explainer, Missed
from tiering.replay.stack import SimulatedStack


class ReplayMisses:
    """The notes about one replay's misses.

    Args:
        config: the stack.
        blocks: largest number of past blocks that are followed.
        stack: its manager over simulated media, which keeps what it explains.
        block_tokens: tokens of one block.
    """

    def __init__(self, config: StackConfig, blocks: int, stack: SimulatedStack, block_tokens: int) -> None:
        capacities = {PRIMARY_TIER: config.primary.capacity // stack.block_bytes}
        capacities |= {tier.tier_name: (tier.capacity_bytes or 0) // stack.block_bytes for tier in config.secondary}
        self._manager = stack.manager
        self._block_tokens = block_tokens
        explaining = MissExplaining(capacities, blocks, requests=1)
        self._explainer = Explainer(explaining, block_tokens, stack.clock.read, pause=lambda: None)

    def missed(self, ctx: ReqContext, keys: Sequence[OffloadKey], held: int, prompt: int, computed: int) -> None:
        """Record what a request computes.

        Args:
            ctx: the request.
            keys: its blocks.
            held: leading blocks that it need not compute.
            prompt: tokens of its prompt.
            computed: tokens that it computes.
        """
        self.follow()
        size = self._block_tokens
        whole = keys[held : prompt // size]
        outcome = self._manager.lookup_outcome(whole[0], ctx) if whole else None
        end = (held + len(whole)) * size
        self._explainer.missed(Missed(ctx.req_id, prompt, held * size, prompt, end, whole, outcome))
        self._explainer.started(ctx.req_id, prompt - computed)
        self._explainer.settle()

    def ended(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Record the end of a request, whose blocks are known from now on."""
        self._explainer.ended(ctx.req_id, keys)

    def follow(self) -> None:
        """Record what the tiers did since the last call."""
        self._explainer.events(self._manager.take_events())
        self._explainer.unstored(self._manager.take_unstored())
        self._explainer.settle()

    @property
    def totals(self) -> Mapping[str, int]:
        """Computed tokens by cause, tier and reason, the most expensive first."""
        return {
            f"{cause.word} {tier}".rstrip() + (f" ({reason.word})" if reason else ""): tokens
            for (cause, tier, reason), tokens in self._explainer.sums.most_common()
        }
