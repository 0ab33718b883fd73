"""A connector for vLLM's MultiConnector that promises KV, loads none, and reports the failure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from tests.vllm.rig import BLOCK

PARAMETER = "flaky"
"""Key in ``kv_transfer_params``; the value is ``{"blocks": n, "asynchronously": bool}``.

``blocks`` is the number of promised blocks.
"""


@dataclass
class FlakyMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """First promised block of each request, and requests that wait for an asynchronous load."""

    unfilled: list[int] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)


class FlakyConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A connector that fills no block and reports the first block of each promise as failed.

    The engine recomputes all blocks from the reported one on.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.promised: set[str] = set()
        self.failed = 0
        self.before_reporting: Any = None
        """Called on the worker's side at the end of each step, when other connectors have queued stores."""
        self._found: dict[str, int] = {}
        self._next = FlakyMetadata()
        self._unfilled: set[int] = set()
        self._waiting: set[str] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -------------------------------------------------------------------------------------------------------- scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        promise = (request.kv_transfer_params or {}).get(PARAMETER)
        if promise is None or request.request_id in self.promised:
            return 0, False
        self._found[request.request_id] = num_computed_tokens
        return max(0, promise["blocks"] * BLOCK - num_computed_tokens), promise["asynchronously"]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.promised.add(request.request_id)
            (table,) = blocks.get_block_ids()
            self._next.unfilled.append(table[self._found[request.request_id] // BLOCK])
            if request.kv_transfer_params[PARAMETER]["asynchronously"]:
                self._next.waiting.append(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> FlakyMetadata:
        meta, self._next = self._next, FlakyMetadata()
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    # ----------------------------------------------------------------------------------------------------------- worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        self._unfilled.update(meta.unfilled)
        self._waiting.update(meta.waiting)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Load nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        if self.before_reporting is not None:
            self.before_reporting()

    def get_finished(self, finished_req_ids: Iterable[str]) -> tuple[set[str], set[str]]:
        waiting, self._waiting = self._waiting, set()
        return set(), waiting

    def get_block_ids_with_load_errors(self) -> set[int]:
        unfilled, self._unfilled = self._unfilled, set()
        self.failed += len(unfilled)
        return unfilled
