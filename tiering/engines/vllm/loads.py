"""Which requests' loads have failed, for models with several KV-cache groups: vLLM takes requests there, the core reports blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, ReqId
from tiering.simple.metadata import SimpleCPUOffloadMetadata


def ordered_loads(
    metadata: OffloadingConnectorMetadata | SimpleCPUOffloadMetadata,
) -> tuple[dict[ReqId, set[int]], Collection[ReqId]]:
    """The GPU blocks that a step's loads are to fill, by request; and the requests of whose hits nothing can be loaded."""
    if isinstance(metadata, SimpleCPUOffloadMetadata):
        return metadata.blocks_by_request(), ()
    blocks = {
        req_id: set(order.spec[1].block_ids.tolist())
        for req_id, order in metadata.reqs_to_load.items()
        if isinstance(order.spec[1], GPULoadStoreSpec)
    }
    return blocks, metadata.failed_loads


class LoadLedger:
    """The GPU blocks of each request that is being loaded, and the requests of whose hits nothing could be loaded.

    While a request is being loaded nobody else has its blocks, so that a block that was not filled tells whose load it
    was of.
    """

    def __init__(self) -> None:
        self._blocks: dict[ReqId, set[int]] = {}
        self._shrunk: set[ReqId] = set()

    def started(self, blocks: Mapping[ReqId, set[int]], shrunk: Collection[ReqId] = ()) -> None:
        """These loads begin with this step.  The same loads again change nothing."""
        for req_id, ids in blocks.items():
            self._blocks.setdefault(req_id, set()).update(ids)
        self._shrunk.update(shrunk)

    def failed(self, received: Collection[ReqId], unfilled: Collection[int]) -> set[ReqId]:
        """Of the requests whose load has ended, those that lack something; ``unfilled`` are the blocks that were not filled."""
        unfilled = set(unfilled)
        return {
            req_id
            for req_id in received
            if req_id in self._shrunk or not unfilled.isdisjoint(self._blocks.get(req_id, ()))
        }

    def ended(self, received: Collection[ReqId]) -> None:
        """Forget these requests."""
        for req_id in received:
            self._blocks.pop(req_id, None)
        self._shrunk.difference_update(received)
