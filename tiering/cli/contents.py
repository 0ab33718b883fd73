"""The content of a tier by namespace and epoch, and its table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click
from rich.table import Table

from tiering.admin.records import EpochState, KnownNamespace
from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.cli.output import age, stdout


@dataclass(slots=True)
class EpochContent:
    """The blocks of one epoch on one tier."""

    namespace: str
    """Base of the namespace in hexadecimal; empty if the medium does not name it."""
    label: str
    """Model and data type."""
    fingerprint: str
    """Fingerprint of namespace and epoch in hexadecimal; empty for a namespace without blocks."""
    state: str
    """State of the epoch, a value of :class:`EpochState` as text."""
    blocks: int = 0
    """Number of blocks that the listing found in the epoch; default 0."""
    nbytes: int = 0
    """Bytes of the blocks on the medium."""
    oldest: float | None = None
    """Time of the earliest write, in seconds since 1970."""
    newest: float | None = None
    """Time of the latest write, in seconds since 1970."""
    holder: str = ""
    """Process that wrote the epoch's lease last; empty (default): no lease, as for the common epoch."""


@dataclass(frozen=True, slots=True)
class TierContent:
    """The blocks on one tier's medium, by namespace and epoch, and what could not be read."""

    place: str
    """The medium's place."""
    owner: str | None
    """The process that owns the medium; None if there is none."""
    epochs: list[EpochContent]
    """The content by namespace and epoch."""
    unreadable: int = 0
    """Number of places whose header is damaged or cannot be read; their blocks count nowhere else."""

    suspects: int = 0
    """Number of objects that a machine has noted as corrupt, and no other machine has confirmed."""
    hot_keys: int = 0
    """Number of engines whose published keys a warm start finds."""


async def read_content(admin: TierAdmin) -> TierContent:
    """List all blocks of a tier, and return how many each epoch has.

    Raises:
        UnsupportedError: the medium cannot list its blocks.
        StoreError: the blocks cannot be listed.
    """
    known = {namespace.name: namespace for namespace in await admin.namespaces()}
    epochs: dict[tuple[str, str], EpochContent] = {}
    for namespace in known.values():
        for fingerprint in namespace.epochs:
            epochs[namespace.name, fingerprint] = _empty(known, namespace.name, fingerprint)
    async for block in admin.blocks():
        key = (block.namespace, block.fingerprint)
        content = epochs.get(key)
        if content is None:
            content = epochs[key] = _empty(known, *key)
        content.blocks += 1
        content.nbytes += block.nbytes
        content.oldest = block.modified if content.oldest is None else min(content.oldest, block.modified)
        content.newest = block.modified if content.newest is None else max(content.newest, block.modified)
    ordered = sorted(epochs.values(), key=lambda found: (found.namespace, -found.blocks, found.fingerprint))
    return TierContent(admin.place, admin.owner(), ordered, admin.unreadable, admin.suspects, admin.hot_keys)


def _empty(known: Mapping[str, KnownNamespace], namespace: str, fingerprint: str) -> EpochContent:
    found = known.get(namespace)
    label = "unknown model" if found is None else found.label
    state = EpochState.ABANDONED if found is None else found.epochs.get(fingerprint, EpochState.ABANDONED)
    holder = "" if found is None else found.holders.get(fingerprint, "")
    return EpochContent(namespace, label, fingerprint, str(state), holder=holder)


def print_contents(contents: Mapping[str, TierContent]) -> None:
    """Print one table per tier on a terminal, lines of words between tabs otherwise."""
    console = stdout()
    for tier, content in contents.items():
        rows = [
            (
                found.namespace[:8] or "-",
                found.label,
                found.fingerprint[:8],
                found.state,
                f"{found.blocks:,}",
                format_bytes(found.nbytes),
                "-" if found.oldest is None else age(found.oldest),
                "-" if found.newest is None else age(found.newest),
            )
            for found in content.epochs
        ]
        if not console.is_terminal:
            for row in rows:
                click.echo("\t".join((tier, *row)))
            if content.unreadable:
                click.echo(f"{tier}\tunreadable\t{_unreadable(content)}")
            if content.suspects:
                click.echo(f"{tier}\tsuspects\t{_suspects(content)}")
            if content.hot_keys:
                click.echo(f"{tier}\thot keys\t{_hot_keys(content)}")
            for line in _holders(content):
                click.echo(f"{tier}\tlease\t{line}")
            continue
        table = Table(title=f"{tier}: {content.place}", title_justify="left", caption_justify="left")
        for heading in ("namespace", "model", "epoch", "state", "blocks", "bytes", "oldest", "newest"):
            table.add_column(heading, justify="right" if heading in {"blocks", "bytes", "oldest", "newest"} else "left")
        for row in rows:
            table.add_row(*row)
        owner = [] if content.owner is None else [f"in use by {content.owner}"]
        unreadable = [_unreadable(content)] if content.unreadable else []
        suspects = [_suspects(content)] if content.suspects else []
        hot_keys = [_hot_keys(content)] if content.hot_keys else []
        table.caption = "\n".join([*owner, *unreadable, *suspects, *hot_keys, *_holders(content)]) or None
        console.print(table)


def _holders(content: TierContent) -> list[str]:
    return [f"{found.fingerprint[:8]} is the epoch of {found.holder}" for found in content.epochs if found.holder]


def _unreadable(content: TierContent) -> str:
    return f"{content.unreadable:,} slots with a header that is damaged or cannot be read; engines treat them as empty"


def _hot_keys(content: TierContent) -> str:
    return f"{content.hot_keys:,} engines have published which blocks they use most, for a warm start"


def _suspects(content: TierContent) -> str:
    return f"{content.suspects:,} objects that one machine reads corrupt; run inspect with --verify on another machine"
