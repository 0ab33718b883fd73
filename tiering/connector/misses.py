"""The misses of the connector's requests, as the explainer gets them from the scheduler's thread.

A request is noted once: when it first gets GPU blocks, with the keys that it neither found nor loads. What the tiers
did before is noted first, so that the explainer sees the tiers as the lookup did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tiering.api.engine import MissExplaining
from tiering.api.manager import OffloadingEvent, OffloadingManager
from tiering.connector.groups import OffloadGroup
from tiering.connector.hits import HitSearch
from tiering.connector.requests import RequestState
from tiering.explain.causes import Reason
from tiering.explain.explainer import Explainer, Missed
from tiering.explain.past_prompts import NO_PROMPT, Prompt
from tiering.explain.service import ExplainService

STOP_SECONDS = 5.0
"""Longest wait for the explainer's thread at a shutdown, in seconds."""


class Misses:
    """The notes about one scheduler half's misses, and the explainer that gets them.

    Args:
        explaining: settings of the explanation.
        groups: the KV-cache groups.
        manager: the manager of the tiers.
        search: the search for hits.
        clock: returns monotonic seconds.
        publishes: True if the engine takes the events of the tiers as well.
    """

    def __init__(
        self,
        explaining: MissExplaining,
        groups: Sequence[OffloadGroup],
        manager: OffloadingManager,
        search: HitSearch,
        clock: Callable[[], float],
        *,
        publishes: bool,
    ) -> None:
        self._groups = groups
        self._manager = manager
        self._group = search.measure
        self._to_leave = search.tokens_to_leave
        self._publishes = publishes
        self._untaken: list[OffloadingEvent] = []
        self._block_bytes = explaining.block_bytes
        self._sized = {name for name, blocks in explaining.capacities.items() if blocks}
        """Names of the tiers whose capacity is known, or was looked for."""
        self.explainer = Explainer(explaining, self._group.offloaded_block_size, clock)
        """The explainer."""
        self.service = ExplainService(self.explainer, explaining.socket, manager.cold_starts)
        """The explainer's thread and socket."""

    def totals(self) -> dict[str, dict[str, int]]:
        """Return the computed prompt tokens; each name has a cause and a tier, with a space in between."""
        return {f"{cause.word} {tier}": {"missed_tokens": n} for (cause, tier), n in self.explainer.totals.items()}

    def take_events(self) -> list[OffloadingEvent]:
        """Note the events of the tiers, and return those since the last call."""
        self._follow()
        taken, self._untaken = self._untaken, []
        return taken

    def _follow(self) -> None:
        """Note what the tiers did since the last call."""
        events = self._manager.take_events()
        if events:
            for tier in {event.tier for event in events if event.evicted} - self._sized:
                self._find_capacity(tier)
            self.explainer.events(events)
            if self._publishes:
                self._untaken += events
        if unstored := self._manager.take_unstored():
            self.explainer.unstored(unstored)

    def _find_capacity(self, tier: str) -> None:
        """Take the capacity of a tier from its statistics: a tier that evicts has one, in another process too."""
        self._sized.add(tier)
        size = self._manager.get_stats().get("tiers", {}).get(tier, {}).get("capacity_bytes", 0)
        self.explainer.set_capacity(tier, int(size) // self._block_bytes)

    def note(self, state: RequestState, paused: bool, preparing: bool) -> None:
        """Note what a request has to compute.

        Args:
            state: the request, whose load is planned.
            paused: True if nothing can be loaded at present.
            preparing: True if that is because the rows are being prepared, and False during a reset.
        """
        state.is_explained = True
        self._follow()
        size, prompt = self._group.offloaded_block_size, state.request.num_prompt_tokens
        keys, first = state.keys[self._group.group_idx], state.filled_tokens // size
        ahead = self._group.lookahead_blocks
        coverable = max(first, min(prompt // size - ahead, (prompt - self._to_leave) // size))
        missed = keys[first : max(first, min(coverable, len(keys) - ahead))]
        allowed = 0 if paused or not state.may_load else prompt
        refusal = (Reason.PREPARING if preparing else Reason.RESET) if paused else _refusal(state)
        if state.policy.max_load_tokens is not None:
            allowed = min(allowed, state.policy.max_load_tokens)
        end = (first + len(missed)) * size
        if first + len(missed) < coverable and end < allowed:  # the blocks of an adapter that is not known have no keys
            allowed, refusal = end, Reason.ADAPTER
        outcome = self._manager.lookup_outcome(missed[0], state.ctx) if missed else None
        if outcome is not None and state.parted_at > state.filled_tokens:
            outcome = outcome._replace(cut=True)
        tokens = _prompt(state)
        name, filled = state.ctx.req_id, state.filled_tokens
        self.explainer.missed(Missed(name, prompt, filled, allowed, coverable * size, missed, outcome, tokens, refusal))

    def end_step(self, started: Iterable[Any]) -> None:
        """Note what the tiers did, and the requests that begin to compute.

        Args:
            started: the engine's descriptions of the requests that run for the first time.
        """
        self._follow()
        for new in started:
            self.explainer.started(new.req_id, new.num_computed_tokens)

    def ended(self, state: RequestState) -> None:
        """Note the end of a request, whose blocks are known from now on."""
        state.extend_keys(self._groups)
        self.explainer.ended(state.ctx.req_id, state.keys[self._group.group_idx], _prompt(state))

    def reset(self) -> None:
        """Note that all blocks were dropped."""
        self.explainer.reset()

    def shut_down(self) -> None:
        """End the explainer's thread, and remove its socket."""
        self.service.stop(STOP_SECONDS)


def _refusal(state: RequestState) -> Reason:
    """Return the reason why a request must not load, if it must not."""
    if state.variant is not None and state.variant.is_void:
        return Reason.ADAPTER
    if getattr(state.request, "skip_reading_prefix_cache", False):
        return Reason.LOGPROBS
    return Reason.PARAMETERS


def _prompt(state: RequestState) -> Prompt:
    """Return the tokens of a request by reference; none if its keys depend on more than salt and adapter."""
    request, variant = state.request, state.variant
    if getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
        return NO_PROMPT
    adapter = getattr(request.lora_request, "lora_name", "")
    if variant is not None:
        if not variant.identity:
            return NO_PROMPT
        adapter = f"{adapter} {variant.identity}"
    return Prompt(request.all_token_ids, getattr(request, "cache_salt", None) or "", adapter)
