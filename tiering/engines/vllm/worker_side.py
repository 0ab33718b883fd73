"""The worker side of the connector: the methods that vLLM's workers call.

Import this module after the checks of :mod:`tiering.engines.vllm.connector`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.copy.canonical import LayerCache
from tiering.engines.vllm.adapter_loads import AdapterLoads
from tiering.engines.vllm.kept_groups import KeptGroups
from tiering.engines.vllm.loads import LoadLedger, ordered_loads
from tiering.errors import ConfigError
from tiering.simple.metadata import SimpleCPUOffloadWorkerMetadata
from tiering.simple.worker import SimpleCPUOffloadWorker

TransferResults = getattr(vllm_base, "KVConnectorTransferResults", None)
"""vLLM's class for reports of requests with failed loads; None before vLLM 0.30."""


LOAD_PATIENCE = 1e-3
"""Most seconds that a step without tokens waits for a load.

vLLM's engine core rests as long after such a step. A load that ends meanwhile needs no further step to be reported, and
a caller that steps in a loop, in its own process, does not keep the interpreter from the threads that copy.
"""


class WorkerSide(KVConnectorBase_V1):  # type: ignore[misc]
    """The methods of the connector that vLLM's workers call."""

    worker_half: OffloadingConnectorWorker | SimpleCPUOffloadWorker | None = None
    """The worker half, for the mode of the stack; None in the scheduler's connector."""
    _several_groups: bool
    _kept: KeptGroups | None = None
    """The groups that are offloaded; None: all."""
    _may_rest: bool
    """True if a step without tokens delays no other pipeline stage and no other data-parallel engine."""
    _patience: float = 0.0
    """Seconds that this step may wait for a load."""
    _loads_first: bool = False
    """True if the loads of a step may start before its model runs.

    From 0.32 on, vLLM calls :meth:`start_load_kv` behind the model. A request would wait one step more for its load.
    """
    _ledger: LoadLedger
    _adapter_loads: AdapterLoads | None = None
    """The adapters that this worker has loaded; None: nothing is known about them."""

    def _no_worker(self) -> NoReturn:
        """Refuse a call of the other side, which has no :attr:`worker_half`.

        Every step makes these calls. A property that returned the half would cost each of them another call.
        """
        raise ConfigError("a method of vLLM's workers was called on the scheduler's connector")

    def register_kv_caches(self, kv_caches: dict[str, LayerCache]) -> None:
        kept = kv_caches if self._kept is None else self._kept.caches(kv_caches)
        (self.worker_half or self._no_worker()).register_kv_caches(kept)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any = None) -> None:
        half = self.worker_half or self._no_worker()
        if not isinstance(half, OffloadingConnectorWorker):
            raise ConfigError(
                "mode simple cannot offload a KV cache that is one tensor over all layers; use mode tiering"
            )
        half.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def unregister_kv_caches(self) -> None:
        """End all copies before the engine sleeps; vLLM 0.33 and newer call this method.

        The caches return at the same addresses, so nothing else needs to change.
        """
        (self.worker_half or self._no_worker()).drain()

    def handle_preemptions(self, kv_connector_metadata: Any, *args: Any, **kwargs: Any) -> None:
        """End the copies whose blocks the step reuses, and start the loads.

        Beside other connectors the loads start with :meth:`start_load_kv`: before their own call of this method, the
        others may still read the blocks that a load writes.
        """
        half = self.worker_half or self._no_worker()
        half.handle_preemptions(kv_connector_metadata)
        if self._loads_first and get_kv_transfer_group() is self:
            half.start_kv_transfers(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._may_rest:
            # The second runner starts loads outside the forward pass too, and then describes the step's requests.
            is_idle = not kwargs and forward_context.attn_metadata is None
            self._patience = LOAD_PATIENCE if is_idle else 0.0
        if self._several_groups:
            self._ledger.started(*ordered_loads(metadata))
        (self.worker_half or self._no_worker()).start_kv_transfers(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no request is computed before its whole load has ended, or is in front of the model."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole blocks are stored, from the next step on."""

    def wait_for_save(self) -> None:
        """Queue the step's stores without waiting. The blocks are fenced until the stores end."""
        (self.worker_half or self._no_worker()).prepare_store_kv(self._get_connector_metadata())

    def clear_connector_metadata(self) -> None:
        """End the step, and queue its stores if vLLM has not called :meth:`wait_for_save`.

        vLLM before 0.31 skips that call in steps without tokens.
        """
        if self.worker_half is not None and self.has_connector_metadata():
            self.worker_half.prepare_store_kv(self._get_connector_metadata())
        super().clear_connector_metadata()

    def get_finished(self, finished_req_ids: Collection[str]) -> tuple[set[str], set[str]]:
        sent, received = (self.worker_half or self._no_worker()).get_finished(finished_req_ids, self._patience)
        if self._several_groups:
            self._ledger.ended(received)
        return sent, received

    def get_transfer_results(self, finished_req_ids: Collection[str]) -> Any:
        """Return the requests whose load has ended.

        With several KV-cache groups, the result also names the requests whose load failed.
        """
        sent, received = (self.worker_half or self._no_worker()).get_finished(finished_req_ids, self._patience)
        failed = set()
        if self._several_groups:
            failed = self._ledger.failed(
                received, (self.worker_half or self._no_worker()).get_block_ids_with_load_errors()
            )
            self._ledger.ended(received)
        if TransferResults is None:
            raise ConfigError("this vLLM has no KVConnectorTransferResults; it should call get_finished")
        return TransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that failed loads did not fill.

        With several KV-cache groups the set is empty, because vLLM takes reports of requests instead.
        """
        if self._several_groups:
            return set()
        failed = (self.worker_half or self._no_worker()).get_block_ids_with_load_errors()
        if self._adapter_loads is None:
            return failed
        metadata = self._get_connector_metadata()
        if isinstance(metadata, OffloadingConnectorMetadata) and metadata.adapters_to_read:
            self._adapter_loads.read(metadata.adapters_to_read)
        stale = self._adapter_loads.check(metadata.adapter_checks)
        return failed | stale if stale else failed

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        if self.worker_half is None:
            return None
        report = self.worker_half.build_connector_worker_meta()
        if self._adapter_loads is not None and (adapters := self._adapter_loads.take_news()):
            simple = isinstance(self.worker_half, SimpleCPUOffloadWorker)
            report = report or (SimpleCPUOffloadWorkerMetadata() if simple else OffloadingWorkerMetadata())
            report.adapters = adapters
        return report
