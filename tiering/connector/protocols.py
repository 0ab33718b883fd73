"""Protocols of the engine's objects that the connector uses.

Names and meanings are those of vLLM 0.29 to 0.33, because the same core serves vLLM and the mini engine of the tests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """A request in the scheduler.

    Three further attributes may be absent. ``arrival_time`` (default: not known) is the time of the arrival in seconds,
    on any clock. ``num_output_placeholders`` (default: 0) counts scheduled output tokens whose value is not known yet.
    ``skip_reading_prefix_cache`` (default: False) is True if every token of the prompt must be computed.
    """

    @property
    def request_id(self) -> str:
        """Id of the request."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""

    @property
    def num_tokens(self) -> int:
        """Number of known tokens, prompt and output."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in the cache; not advanced yet during ``build_connector_meta``."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """One hash per full hash-block of known tokens; can lag under asynchronous scheduling."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """All known tokens."""

    @property
    def lora_request(self) -> Any:
        """The LoRA adapter of the request; None without one."""

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Parameters for the connector that the user passed with the request; None without any."""


class AllocatedBlocks(Protocol):
    """All GPU blocks of one request in logical order, null blocks (id 0) included."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block ids by KV-cache group."""


class NewRequestData(Protocol):
    """A request that is scheduled for the first time."""

    @property
    def req_id(self) -> str:
        """Id of the request."""

    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """All block ids of the request so far, by KV-cache group."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in the cache."""


class CachedRequestData(Protocol):
    """The changes of requests that were scheduled before, as lists in the order of ``req_ids``."""

    @property
    def req_ids(self) -> Sequence[str]:
        """Ids of the requests."""

    @property
    def resumed_req_ids(self) -> Collection[str]:
        """Ids of the requests that continue after a preemption."""

    @property
    def new_block_ids(self) -> Sequence[tuple[list[int], ...] | None]:
        """New block ids by KV-cache group; None if there are none.

        The ids are appended to the request's block ids, or replace all of them for a request in ``resumed_req_ids``.
        """

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Number of tokens of each request whose KV is in the cache."""


class SchedulerOutput(Protocol):
    """The schedule of one step."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequestData]:
        """Requests that are scheduled for the first time."""

    @property
    def scheduled_cached_reqs(self) -> CachedRequestData:
        """Requests that were scheduled before."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Number of tokens that the step computes, by request id."""

    @property
    def preempted_req_ids(self) -> Collection[str] | None:
        """Ids of the requests that were preempted; None is the same as empty."""

    @property
    def finished_req_ids(self) -> Collection[str]:
        """Ids of the requests that have ended since the last step."""


class ConnectorOutput(Protocol):
    """Reports of the workers for one step, merged over the workers."""

    @property
    def finished_sending(self) -> Collection[str] | None:
        """Ids of the requests whose blocks may be freed on all workers."""

    @property
    def finished_recving(self) -> Collection[str] | None:
        """Ids of the requests whose load has ended on all workers, failed loads included."""

    @property
    def invalid_block_ids(self) -> Collection[int]:
        """GPU blocks that failed loads did not fill."""

    @property
    def kv_connector_worker_meta(self) -> Any:
        """The connector's own report of its workers; None without one."""
