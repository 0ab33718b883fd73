"""Protocols of the engine's objects that the connector uses.

Names and meanings are those of vLLM 0.29 to 0.33, because the same core serves vLLM and the mini engine of the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """A request in the scheduler.

    Two further attributes may be absent. ``num_output_placeholders`` (default: 0) counts scheduled output tokens whose
    value is not known yet. ``skip_reading_prefix_cache`` (default: False) is True if every token of the prompt must be
    computed.
    """

    request_id: str
    """Id of the request."""
    num_prompt_tokens: int
    """Number of prompt tokens."""
    num_tokens: int
    """Number of known tokens, prompt and output."""
    num_computed_tokens: int
    """Number of tokens whose KV is in the cache; not advanced yet during ``build_connector_meta``."""
    block_hashes: Sequence[bytes]
    """One hash per full hash-block of known tokens; can lag under asynchronous scheduling."""
    all_token_ids: Sequence[int]
    """All known tokens."""
    lora_request: Any
    """The LoRA adapter of the request; None without one."""
    kv_transfer_params: Mapping[str, Any] | None
    """Parameters for the connector that the user passed with the request; None without any."""


class AllocatedBlocks(Protocol):
    """All GPU blocks of one request in logical order, null blocks (id 0) included."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block ids by KV-cache group."""


class NewRequestData(Protocol):
    """A request that is scheduled for the first time."""

    req_id: str
    """Id of the request."""
    block_ids: tuple[list[int], ...]
    """All block ids of the request so far, by KV-cache group."""
    num_computed_tokens: int
    """Number of tokens whose KV is in the cache."""


class CachedRequestData(Protocol):
    """The changes of requests that were scheduled before, as lists in the order of ``req_ids``."""

    req_ids: Sequence[str]
    """Ids of the requests."""
    resumed_req_ids: Collection[str]
    """Ids of the requests that continue after a preemption."""
    new_block_ids: Sequence[tuple[list[int], ...] | None]
    """New block ids by KV-cache group; None if there are none.

    The ids are appended to the request's block ids, or replace all of them for a request in ``resumed_req_ids``.
    """
    num_computed_tokens: Sequence[int]
    """Number of tokens of each request whose KV is in the cache."""


class SchedulerOutput(Protocol):
    """The schedule of one step."""

    scheduled_new_reqs: Sequence[NewRequestData]
    """Requests that are scheduled for the first time."""
    scheduled_cached_reqs: CachedRequestData
    """Requests that were scheduled before."""
    num_scheduled_tokens: Mapping[str, int]
    """Number of tokens that the step computes, by request id."""
    preempted_req_ids: Collection[str] | None
    """Ids of the requests that were preempted; None is the same as empty."""
    finished_req_ids: Collection[str]
    """Ids of the requests that have ended since the last step."""


class ConnectorOutput(Protocol):
    """Reports of the workers for one step, merged over the workers."""

    finished_sending: Collection[str] | None
    """Ids of the requests whose blocks may be freed on all workers."""
    finished_recving: Collection[str] | None
    """Ids of the requests whose load has ended on all workers, failed loads included."""
    invalid_block_ids: Collection[int]
    """GPU blocks that failed loads did not fill."""
    kv_connector_worker_meta: Any
    """The connector's own report of its workers; None without one."""
