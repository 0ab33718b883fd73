"""The options of the Mooncake tier in a stack file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from tiering.tier import BlockTierOptions, Duration, SharedOptions, Size, Transfers

LEAST_SEGMENT = 16 << 20
"""Smallest segment that Mooncake accepts, in bytes."""

_MASTER_EVICTS = "Mooncake's master evicts; set its eviction_high_watermark_ratio and eviction_ratio"


class MooncakeOptions(BlockTierOptions, SharedOptions):
    """The options of the Mooncake tier.

    The stack also needs a ``revision``, because the pool keeps no documents.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": "the pool is the sum of all machines' segments; segment_size is the part of this engine",
        "high_watermark": _MASTER_EVICTS,
        "low_watermark": _MASTER_EVICTS,
        "eviction": _MASTER_EVICTS,
        "ttl": "its blocks leave by eviction when room is needed",
        "compression": "reading from the pool is faster than zstd; use compression in an object store behind it",
    }

    type: str = "mooncake"
    """The tier's type in a stack file."""
    master: Annotated[str, Field(pattern=r"^[^\s/@:]+:\d{1,5}$|^\[[0-9a-fA-F:.]+\]:\d{1,5}$")]
    """Address of Mooncake's master, written like ``10.0.0.1:50051`` or ``[::1]:50051``."""
    metadata: str = "P2PHANDSHAKE"
    """Address of Mooncake's metadata server; default "P2PHANDSHAKE": addresses are exchanged."""
    host: str | None = None
    """Name or address of this machine for the others; default: its address towards the master."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport of the blocks; default "tcp"."""
    devices: str = ""
    """Names of the RDMA devices, separated by commas; default: Mooncake's choice."""
    segment_size: Size | None = None
    """Memory that this engine gives to the pool, in bytes, at least 16 MiB; None (default): none.

    The memory is beside ``primary.capacity``, and its blocks are lost when the engine ends. Processes of
    ``mooncake_client`` can give memory that outlives engines.
    """
    replicas: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of machines that hold a block, if there are as many; default 1."""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")] = "kv-tiering"
    """Beginning of all names in the pool, of letters, digits and ``._:/-``; default "kv-tiering".

    Several stacks can share a pool.
    """
    present_ttl: Duration = 30.0
    """Time for which a positive probe result stays valid; default 30."""
    lookup_deadline: Duration = 0.1
    """Seconds that a lookup may stay undecided before the answer is no; default 0.1."""
    load_deadline: Duration | None = 1.0
    """Seconds that a request waits for a load; default 1. Stores have ``deadline``.

    Blocks that arrive later are misses. The blocks in front of them that arrived in time count.
    """
    max_inflight: Transfers = 2
    """Number of calls, of up to 8 MiB each, at the same time (threads); default 2.

    Mooncake's client waits by polling: each call under way keeps a core busy.
    """
    request_timeout: Duration = Field(default=5.0, ge=1.0, le=30.0)
    """Seconds after which a call to the master or a transfer without progress fails; default 5.

    The longest is 30. The first Mooncake tier of a process decides for all. The variables MC_RPC_TIMEOUT_MS and
    MC_TCP_PROGRESS_TIMEOUT_SEC of the environment come first.
    """

    @field_validator("metadata")
    @classmethod
    def _check_metadata(cls, metadata: str) -> str:
        if metadata != "P2PHANDSHAKE" and "://" not in metadata:
            raise ValueError(
                "metadata is P2PHANDSHAKE or an address like http://host:8080/metadata or etcd://host:2379"
            )
        return metadata

    @field_validator("segment_size")
    @classmethod
    def _check_segment(cls, size: int | None) -> int | None:
        if size is not None and size < LEAST_SEGMENT:
            raise ValueError(f"segment_size {size} is below the {LEAST_SEGMENT >> 20} MiB of a segment; raise it")
        return size

    @property
    def location(self) -> str:
        """Master and prefix, as text for people."""
        return f"mooncake://{self.master} {self.prefix}"
