"""The model of an engine and of its media, by which a replay turns blocks into seconds and dollars.

Simple on purpose, so that each number can be checked by hand:

- A prompt token that is computed takes ``1 / prefill_tokens_per_second``. Requests do not queue for the accelerator.
- A load from the primary tier takes ``bytes / device_bytes_per_second``.
- A job of n blocks between the primary tier and another tier begins when the previous job in its direction has ended.
  The job takes the longer of ``latency + bytes / bandwidth`` and ``ceil(n / max_inflight) * latency``.
- Blocks wait for a tier's credit in the manager, as in an engine: other stores and promotions may take their rows.
- A store that finds no room is offered once more a moment later, and then the half of it that has room.
- A probe of a shared medium takes one ``latency``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from tiering.api.units import Duration, Size, Strict
from tiering.config.problems import problems_of, refuse
from tiering.config.registry import tier_definition
from tiering.config.source import StackSource, read_plain
from tiering.errors import ConfigError
from tiering.secondary.options import TierOptions

HOURS_PER_MONTH = 730.0
"""Hours of a month, as clouds count them."""

Dollars = Annotated[float, Field(ge=0.0)]


class MediumModel(Strict):
    """Speed and price of one medium."""

    read_bytes_per_second: Size
    """Bandwidth of loads, in bytes per second."""
    write_bytes_per_second: Size
    """Bandwidth of stores, in bytes per second."""
    latency: Duration
    """Time until the first byte of a block arrives, in seconds."""
    dollars_per_gib_month: Dollars = 0.0
    """Price of one GiB for a month: of the capacity, or of the bytes in the steady state without one."""
    dollars_per_million_writes: Dollars = 0.0
    """Price of a million blocks written."""
    dollars_per_million_reads: Dollars = 0.0
    """Price of a million blocks read or probed."""
    dollars_per_gib_read: Dollars = 0.0
    """Price of one GiB that is read (traffic out of the service)."""


_PROCESS = MediumModel(read_bytes_per_second=10**10, write_bytes_per_second=10**10, latency=1e-5)
_MACHINE = MediumModel(
    read_bytes_per_second=6 * 10**9, write_bytes_per_second=3 * 10**9, latency=2e-4, dollars_per_gib_month=0.08
)
_NETWORK = MediumModel(
    read_bytes_per_second=2 * 10**9,
    write_bytes_per_second=2 * 10**9,
    latency=0.03,
    dollars_per_gib_month=0.023,
    dollars_per_million_writes=5.0,
    dollars_per_million_reads=0.4,
)


class ReplayModel(Strict):
    """An engine, its media and their prices.

    The defaults describe an 8B model with grouped attention in bfloat16 on one accelerator of the H100 class.
    """

    kv_bytes_per_token: Size = 128 * 1024
    """Bytes of KV of one token, all layers and ranks together; default 128 KiB."""
    prefill_tokens_per_second: Annotated[float, Field(gt=0.0)] = 20_000.0
    """Prompt tokens that the engine computes per second; default 20,000."""
    device_bytes_per_second: Size = 25 * 10**9
    """Bandwidth between the primary tier and the accelerator, in bytes per second; default 25 GB/s."""
    device_cache: Annotated[Size, Field(gt=0)] | None = None
    """Bytes of the engine's own prefix cache on the accelerator; None (default): it is not modelled.

    Without this cache, a hit that the accelerator would have had counts for the primary tier.
    """
    hinted_sessions: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the sessions whose clients name the session and release it at its end; default 0.

    A request continues the session whose last request's blocks it begins with.
    """
    device_dollars_per_hour: Dollars = 2.5
    """Price of the accelerators that compute a prompt; default 2.5."""
    primary_dollars_per_gib_month: Dollars = 2.0
    """Price of one GiB of CPU memory for a month; default 2."""
    compression_ratio: Annotated[float, Field(ge=1.0)] = 1.45
    """Raw bytes by stored bytes in tiers that compress; default 1.45."""
    process: MediumModel = _PROCESS
    """Media in the memory of the process."""
    machine: MediumModel = _MACHINE
    """Media on the machine (NVMe)."""
    network: MediumModel = _NETWORK
    """Media on the network (object stores)."""
    tiers: Mapping[str, MediumModel] = {}
    """Name of a tier → its own medium, instead of the one for its distance."""

    def medium(self, options: TierOptions) -> MediumModel:
        """Return the medium of a tier of a stack."""
        own = self.tiers.get(options.tier_name)
        if own is not None:
            return own
        distance = tier_definition(options.type).distance
        media = {"process": self.process, "machine": self.machine, "network": self.network}
        return media[distance or ("machine" if options.capacity_bytes is not None else "network")]


def load_model(path: Path | None, changes: Mapping[str, object]) -> ReplayModel:
    """Return the model of a YAML file with some values changed.

    Args:
        path: the file; None: the defaults.
        changes: word → value, for the words that replace those of the file.

    Raises:
        ConfigError: the file cannot be read, or a value is wrong; the message lists all problems.
    """
    source = StackSource("model", {}) if path is None else read_plain(path)
    if not isinstance(source.data, dict):
        raise ConfigError(f"{source.name}: is not a mapping; write lines like prefill_tokens_per_second: 20000")
    try:
        return ReplayModel.model_validate({**source.data, **changes})
    except ValidationError as error:
        refuse(source.name, problems_of(error, ReplayModel), source.lines)
