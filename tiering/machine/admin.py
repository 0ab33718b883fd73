"""Administration of a tier of the service, from an engine's stack: whether the service answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tiering.admin.records import Finding, KnownNamespace, Severity, UnsupportedError
from tiering.admin.tier_admin import TierAdmin
from tiering.errors import TieringError
from tiering.machine.link import greet
from tiering.machine.words import Greeting


class MachineAdmin(TierAdmin):
    """Administration of a tier that the service hosts; the stack of the service has its medium."""

    @property
    def place(self) -> str:
        return f"the service at {self.options.socket}"

    def check(self, block_bytes: int) -> Iterator[Finding]:
        path = str(Path(self.options.socket).expanduser())
        try:
            connection = greet(path, Greeting("").text(), (), self.options.user)
        except OSError as error:
            yield Finding(
                Severity.WARNING,
                "service",
                f"nothing answers at {path}: {error.strerror or error}; engines start without the tier and join later",
                "start it with kv-tiering serve",
            )
            return
        except TieringError as error:
            yield Finding(Severity.ERROR, "service", str(error), "use one version, and users that both stacks name")
            return
        tiers = connection.tiers
        connection.close()
        if self.name in tiers:
            yield Finding(Severity.OK, "service", f"it answers at {path} and has this tier")
        else:
            text = f"the service at {path} has no tier {self.name}; it has {', '.join(tiers)}"
            yield Finding(Severity.ERROR, "service", text, "name its tiers in machine.tiers")

    async def namespaces(self) -> list[KnownNamespace]:
        raise UnsupportedError(f"the tier {self.name} is in the service; give the command the service's stack instead")
