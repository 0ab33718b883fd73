"""The block tables of the simple scheduler, whose changes the eager and lazy modes learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiering.offload.block_tables import BlockTables
from tiering.offload.protocols import SchedulerOutput
from tiering.offload.requests import BlockIds
from tiering.simple.eager import EagerStores
from tiering.simple.hits import GroupNeeds
from tiering.simple.lazy import LazyStores
from tiering.simple.requests import RequestState


class WatchedTables(BlockTables[RequestState]):
    """Block tables whose changes are passed on to the eager and lazy modes."""

    def __init__(self, needs: Sequence[GroupNeeds], states: Mapping[str, RequestState]) -> None:
        """Create the tables; :meth:`watch` sets the modes that learn of changes.

        Args:
            needs: the needs of each KV-cache group.
            states: the requests by id; the caller adds and removes them.
        """
        super().__init__(needs, states)
        self._eager: EagerStores | None = None
        self._lazy: LazyStores | None = None

    def watch(self, eager: EagerStores, lazy: LazyStores | None) -> None:
        """Pass changes on from now on.

        Args:
            eager: the eager mode.
            lazy: the lazy mode; None in the eager mode.
        """
        self._eager, self._lazy = eager, lazy

    def follow(self, output: SchedulerOutput) -> None:
        super().follow(output)
        for req_id, tokens in output.num_scheduled_tokens.items() if self.suspects else ():
            state = self._states.get(req_id)
            if state is not None and state.invalid_from is not None:
                self.has_gone_back(state, tokens)

    def start_over(self, state: RequestState) -> None:
        self._forget(state)
        super().start_over(state)

    # ---------------------------------------------------------------------------------------------------------- changes

    def _assign(self, state: RequestState, block_ids: BlockIds) -> None:
        if self._lazy is not None:
            # Known blocks were handed out before; another request may have got them as well since.
            starts = [
                len(g.block_ids) if g.block_ids == ids[: len(g.block_ids)] else 0
                for g, ids in zip(state.groups, block_ids, strict=True)
            ]
            self._handed_out(state, [ids[start:] for ids, start in zip(block_ids, starts, strict=True)], starts)
        super()._assign(state, block_ids)

    def _started(self, req_id: str, block_ids: BlockIds, computed: int) -> None:
        state = self._states.get(req_id)
        if state is not None:
            self._forget(state)
        super()._started(req_id, block_ids, computed)

    def _grew(self, req_id: str, block_ids: BlockIds) -> None:
        state = self._states.get(req_id)
        if state is not None and self._lazy is not None:
            self._handed_out(state, block_ids, [len(group.block_ids) for group in state.groups])
        super()._grew(req_id, block_ids)

    def _distrusted(self, state: RequestState, invalid_from: int) -> None:
        self._forget(state)
        super()._distrusted(state, invalid_from)

    def _forget(self, state: RequestState) -> None:
        """Let the eager mode forget the blocks of a request."""
        if self._eager is not None:
            self._eager.forget(state)

    def _handed_out(self, state: RequestState, block_ids: BlockIds, starts: Sequence[int]) -> None:
        """Pass new GPU blocks of a request on to the lazy mode, with the part of them that may be stored.

        Args:
            state: the request.
            block_ids: the new blocks, per group.
            starts: index of the first new block in the request's block table, per group.
        """
        if self._lazy is None:
            return
        limit = state.policy.max_store_tokens if state.policy.store else 0
        if limit is None:
            self._lazy.handed_out(block_ids)
            return
        sizes = [group.gpu_block_size for group in self._groups]
        self._lazy.handed_out(
            block_ids,
            [max(0, limit // size - start) for size, start in zip(sizes, starts, strict=True)],
            [max(0, (state.found_tokens or 0) // size - start) for size, start in zip(sizes, starts, strict=True)],
        )
