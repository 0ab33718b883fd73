"""What the connector needs of an engine's objects, by attribute.  vLLM's own objects have these; so do the mini engine's.

Names and meanings are vLLM's (0.29 to 0.33), because the same core is driven by both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """A request, as the scheduler holds it.

    ``block_hashes`` has one entry per full hash-block of known tokens; under asynchronous scheduling it can lag.
    ``num_computed_tokens`` counts tokens whose KV is in the cache (during ``build_connector_meta`` it has not advanced
    yet). ``num_output_placeholders`` (0 if absent) are scheduled output tokens whose value is not known yet.
    ``skip_reading_prefix_cache`` (False if absent): every token of the prompt must be computed.
    """

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    lora_request: Any
    kv_transfer_params: Mapping[str, Any] | None


class AllocatedBlocks(Protocol):
    """The GPU blocks of one request, all of them in logical order, null blocks included (id 0)."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids, per KV-cache group."""


class NewRequestData(Protocol):
    """A request scheduled for the first time: all its block ids so far, per group."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequestData(Protocol):
    """Requests scheduled before, co-indexed: what they got in this step.

    ``new_block_ids[i]`` (None: none) are to be appended, or, for a request in ``resumed_req_ids`` (it was preempted),
    replace all.
    """

    req_ids: Sequence[str]
    resumed_req_ids: Collection[str]
    new_block_ids: Sequence[tuple[list[int], ...] | None]
    num_computed_tokens: Sequence[int]


class SchedulerOutput(Protocol):
    """One step's schedule."""

    scheduled_new_reqs: Sequence[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: Mapping[str, int]
    preempted_req_ids: Collection[str] | None
    finished_req_ids: Collection[str]


class ConnectorOutput(Protocol):
    """What the workers of a step reported, already merged over them.

    ``finished_recving``/``finished_sending``: request ids whose load arrived (or failed) / whose blocks may be freed,
    on all workers. ``invalid_block_ids``: GPU blocks that a failed load did not fill. ``kv_connector_worker_meta``: the
    connector's own report of its workers, or None.
    """

    finished_sending: Collection[str] | None
    finished_recving: Collection[str] | None
    invalid_block_ids: Collection[int]
    kv_connector_worker_meta: Any
