"""The words of an engine's stack for the service of its machine."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from tiering.api.units import Directory, Duration, Share, Strict
from tiering.machine.user_names import UserName
from tiering.secondary.options import TierOptions

MACHINE_TYPE = "tiering.machine.tier:MACHINE_TIER"
"""Type of a tier of the service, as the registry finds it; stacks have the word ``machine``."""

PEERS_TYPE = "tiering.machine.peer_tier:PEERS_DEFINITION"
"""Type of the service's tier of other engines' rows."""

PEERS_TIER = "peers"
"""Name of the service's tier whose blocks are in the rows of other engines."""

HOSTED_TYPES = ("local", "memory", "object", "s3", "valkey")
"""Types of tiers that another process can host."""

LONGEST_SOCKET = 107
"""Largest number of bytes of the path of a UNIX socket on Linux."""

MOST_TIERS = 8
"""Largest number of tiers of a service."""


def _checked_socket(path: str) -> str:
    if len(path.encode(errors="surrogateescape")) > LONGEST_SOCKET:
        raise ValueError(f"its path has more than {LONGEST_SOCKET} bytes, which is the limit for a UNIX socket")
    return path


Socket = Annotated[Directory, AfterValidator(_checked_socket)]
"""Path of a UNIX socket."""


class MachineTierOptions(TierOptions):
    """One tier of the service, as an engine uses it."""

    socket: Socket
    """Path of the service's socket."""
    user: UserName | None = None
    """Name or number of the service's user; default: the engine's own."""
    load_deadline: Duration = 30.0
    """Seconds that a request waits for a load; default 30."""
    lookup_deadline: Duration = 0.25
    """Seconds that the service may leave a lookup undecided before the answer is no; default 0.25."""
    primary_share: Share = 0.5
    """Largest share of the primary rows that running loads of this tier may hold; default 0.5."""


class MachineOptions(Strict):
    """The service of this machine that hosts the secondary tiers."""

    socket: Socket
    """Path of the socket that ``kv-tiering serve`` listens on."""
    user: UserName | None = None
    """Name or number of the service's user, who can read this engine's blocks; default: the engine's own.

    A service of any other user is refused. Its stack names the engine's user in ``users``.
    """
    tiers: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")], ...],
        Field(min_length=1, max_length=MOST_TIERS),
    ]
    """Names of the service's tiers that this engine uses, fastest first.

    ``peers`` are the CPU rows of the other engines with ``keep_rows``; it needs that word here, too.
    """
    load_deadline: Duration = 30.0
    """Seconds that a request waits for a load from one of them; default 30."""
    lookup_deadline: Duration = 0.25
    """Seconds that the service may leave a lookup undecided before the answer is no; default 0.25."""
    primary_share: Share = 0.5
    """Largest share of the primary rows that the running loads of one of them may hold; default 0.5.

    A service that hangs holds no more rows than these.
    """
    keep_rows: bool = False
    """True: the CPU tier's rows are memory of the service, and outlive the engine; default False.

    An engine that is started again with the same model and capacity finds its blocks in them.
    """

    def tier_options(self) -> tuple[MachineTierOptions, ...]:
        """Return the options of each tier."""
        return tuple(
            MachineTierOptions(
                type=PEERS_TYPE if name == PEERS_TIER else MACHINE_TYPE,
                name=name,
                socket=self.socket,
                user=self.user,
                load_deadline=self.load_deadline,
                lookup_deadline=self.lookup_deadline,
                primary_share=self.primary_share,
            )
            for name in self.tiers
        )
