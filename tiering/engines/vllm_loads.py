"""Which requests' loads have failed, for models with several KV-cache groups: vLLM takes requests there, the core reports blocks."""

from __future__ import annotations

from collections.abc import Collection

from tiering.base import GPULoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, ReqId


class LoadLedger:
    """The GPU blocks of each request that is being loaded, and the requests of whose hits nothing could be loaded.

    While a request is being loaded nobody else has its blocks, so that a block that was not filled tells whose load it was of.
    """

    def __init__(self) -> None:
        self._blocks: dict[ReqId, set[int]] = {}
        self._shrunk: set[ReqId] = set()

    def started(self, metadata: OffloadingConnectorMetadata) -> None:
        """These loads begin with this step.  The same metadata again changes nothing."""
        for req_id, order in metadata.reqs_to_load.items():
            destination = order.spec[1]
            if isinstance(destination, GPULoadStoreSpec):
                self._blocks.setdefault(req_id, set()).update(destination.block_ids.tolist())
        self._shrunk.update(metadata.failed_loads)

    def failed(self, received: Collection[ReqId], unfilled: Collection[int]) -> set[ReqId]:
        """Of the requests whose load has ended, those that lack something; ``unfilled`` are the blocks that were not filled."""
        unfilled = set(unfilled)
        return {req_id for req_id in received if req_id in self._shrunk or not unfilled.isdisjoint(self._blocks.get(req_id, ()))}

    def ended(self, received: Collection[ReqId]) -> None:
        """Forget these requests."""
        for req_id in received:
            self._blocks.pop(req_id, None)
        self._shrunk.difference_update(received)
