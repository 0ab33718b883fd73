"""The requests with failed loads, for models with several KV-cache groups.

For such models vLLM expects failed requests, while the connector's halves report failed blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, ReqId
from tiering.simple.metadata import SimpleCPUOffloadMetadata


def ordered_loads(
    metadata: OffloadingConnectorMetadata | SimpleCPUOffloadMetadata,
) -> tuple[dict[ReqId, set[int]], Collection[ReqId]]:
    """Return the loads that a step orders.

    Returns:
        The GPU blocks to fill per request; and the requests for which no hit can be loaded any more.
    """
    if isinstance(metadata, SimpleCPUOffloadMetadata):
        metadata = metadata.orders()
    blocks = {
        req_id: set(order.spec[1].block_ids.tolist())
        for req_id, order in metadata.reqs_to_load.items()
        if isinstance(order.spec[1], GPULoadStoreSpec)
    }
    return blocks, metadata.failed_loads


class LoadLedger:
    """The GPU blocks of each request that is being loaded, and the requests without loadable hits.

    While a request is being loaded, no other request has its blocks. A block that was not filled therefore identifies
    the request whose load failed.
    """

    def __init__(self) -> None:
        self._blocks: dict[ReqId, set[int]] = {}
        self._shrunk: set[ReqId] = set()

    def started(self, blocks: Mapping[ReqId, set[int]], shrunk: Collection[ReqId] = ()) -> None:
        """Record the loads that begin with this step. Repeated loads change nothing.

        Args:
            blocks: GPU blocks to fill, per request.
            shrunk: requests for which no hit can be loaded; default none.
        """
        for req_id, ids in blocks.items():
            self._blocks.setdefault(req_id, set()).update(ids)
        self._shrunk.update(shrunk)

    def failed(self, received: Collection[ReqId], unfilled: Collection[int]) -> set[ReqId]:
        """Return the requests whose load has ended and lacks blocks.

        Args:
            received: requests whose load has ended.
            unfilled: GPU blocks that failed loads did not fill.
        """
        unfilled = set(unfilled)
        return {
            req_id
            for req_id in received
            if req_id in self._shrunk or not unfilled.isdisjoint(self._blocks.get(req_id, ()))
        }

    def ended(self, received: Collection[ReqId]) -> None:
        """Forget requests whose load has ended."""
        for req_id in received:
            self._blocks.pop(req_id, None)
        self._shrunk.difference_update(received)
