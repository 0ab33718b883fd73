"""The worker: runs the model over a step's schedule, and the worker half of the connector around it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import xxhash

from examples.mini_engine.kv_cache import KVCacheManager
from examples.mini_engine.model import ModelConfig, PagedKV, Transformer
from examples.mini_engine.request import Request
from examples.mini_engine.scheduler import ConnectorOutput, SchedulerOutput


class WorkerConnector(Protocol):
    """The worker half of a connector, as this engine drives it."""

    def register_kv_caches(self, kv_caches: Any) -> None: ...
    def handle_preemptions(self, metadata: Any) -> None: ...
    def start_kv_transfers(self, metadata: Any) -> None: ...
    def prepare_store_kv(self, metadata: Any) -> None: ...
    def get_finished(self, finished_req_ids: Any) -> tuple[Any, Any]: ...
    def get_block_ids_with_load_errors(self) -> Any: ...
    def get_kv_connector_stats(self) -> Any: ...
    def build_connector_worker_meta(self) -> Any: ...


class Worker:
    """Holds the weights and the KV cache's memory."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, *, kv_first: bool, device: str) -> None:
        self.model = Transformer(config, device)
        self.cache = PagedKV(config, num_blocks, block_size, kv_first, self.model.device)
        self.connector: WorkerConnector | None = None
        self.computed_tokens = 0

    def kv_caches(self) -> dict[str, torch.Tensor]:
        """The KV tensor of each layer by its name, as engines register them with a connector."""
        return {layer_name(layer): self.cache.tensors[place] for layer, place in self.cache.layer_tensor.items()}

    def execute(
        self, output: SchedulerOutput, requests: Mapping[str, Request], kv: KVCacheManager
    ) -> tuple[dict[str, tuple[int, int, float]], ConnectorOutput]:
        """Run one step. A step without tokens leaves out the layers, but copies go on and are collected.

        Returns:
            For each request that got a token, the token, a digest of its logits and the time; and the connector's
            report.
        """
        connector, metadata = self.connector, output.connector_metadata
        if connector is not None:
            connector.handle_preemptions(metadata)
            connector.start_kv_transfers(metadata)
        sampled: dict[str, tuple[int, int, float]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens
            tables = kv.blocks_of(request).get_block_ids()
            logits = self.model.forward(self.cache, request.all_token_ids[end - count : end], end - count, tables)
            self.computed_tokens += count
            if end == request.num_tokens:
                digest = xxhash.xxh3_64_intdigest(logits.cpu().numpy().tobytes())
                sampled[request_id] = int(logits.argmax()), digest, time.perf_counter()
        if connector is None:
            return sampled, ConnectorOutput()
        connector.prepare_store_kv(metadata)
        sent, received = connector.get_finished(output.finished_req_ids)
        return sampled, ConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )


def layer_name(layer: int) -> str:
    """Return the name of ``layer`` in the connector and in the namespace."""
    return f"layers.{layer}.attention"
