"""``inspect``: the content of tiers, and the verification of every checksum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
from rich.table import Table

from tiering.admin.records import EpochState, KnownNamespace
from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.cli.output import age, duration, print_json, stdout
from tiering.cli.parameters import SIZE, json_option
from tiering.cli.tiers import ChosenTiers, chosen_tiers, note
from tiering.cli.verify import Resumable, Verified, verify_tier
from tiering.epochs.nearest import differences

_CPU_TIER = "its blocks end with the engine; kv-tiering top shows them while the engine runs"

SHOWN = 20
"""Damaged blocks that are listed for each tier without ``--json``."""


@click.command(name="inspect")
@click.option("--verify", is_flag=True, help="Read every block and verify its checksums.")
@click.option("--rate", type=SIZE, metavar="SIZE", help="Read at most this many bytes per second in --verify.")
@click.option(
    "--concurrency", type=click.IntRange(1, 256), default=8, show_default=True, help="Blocks read at the same time."
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep the progress of --verify in FILE, and go on from there after an interruption.",
)
@chosen_tiers(_CPU_TIER)
@json_option
def inspect_command(
    chosen: ChosenTiers,
    verify: bool,
    rate: int | None,
    concurrency: int,
    state: Path | None,
    as_json: bool,
) -> int:
    """Show the namespaces, blocks, bytes and ages that the tiers of STACK hold.

    Engines may run meanwhile: nothing is changed. On a local disk, a block's age is that of the last write to its
    segment, and evicted blocks count until they are overwritten. Slots whose header is damaged or cannot be read are
    counted apart. With --verify, damaged and unreadable blocks make the exit code 1; an engine drops such a block when
    it reads the block.

    \b
    Examples:
      kv-tiering inspect stack.yaml
      kv-tiering inspect stack.yaml --tier local --verify --rate 500MB
      kv-tiering inspect stack.yaml --verify --state /var/tmp/verify.json
    """
    if not verify and (rate is not None or state is not None):
        raise click.UsageError("--rate and --state need --verify")
    for options in chosen.tiers:
        for reason in chosen.conflicts(options):
            note(options.tier_name, f"{reason}, and the blocks of this directory are counted twice")
    progress = Resumable(state, chosen.path) if verify else None

    async def work(admin: TierAdmin) -> tuple[TierContent, Verified | None]:
        content = await read_content(admin)
        if chosen.replica is None and (names := admin.replicas()):
            note(admin.name, f"data-parallel replicas, or namespaces of a service, for --replica: {', '.join(names)}")
        if progress is None:
            return content, None
        return content, await verify_tier(admin, content.nbytes, progress, rate=rate, concurrency=concurrency)

    results, code = chosen.for_each(work)
    contents = {tier: content for tier, (content, _) in results.items()}
    verified = {tier: found for tier, (_, found) in results.items() if found is not None}
    damaged = any(found.damaged or contents[tier].unreadable for tier, found in verified.items())
    if progress is not None and not code:
        progress.finish()
    if as_json:
        print_json(
            {
                tier: asdict(content) | ({"verified": asdict(verified[tier])} if tier in verified else {})
                for tier, content in contents.items()
            }
        )
    else:
        print_contents(contents)
        for tier, found in verified.items():
            _print_verified(tier, found)
    return int(damaged) or code


def _print_verified(tier: str, found: Verified) -> None:
    for place, reason in found.damaged[:SHOWN]:
        click.echo(f"{tier}\tdamaged\t{place}\t{reason}")
    if len(found.damaged) > SHOWN:
        click.echo(f"{tier}\tdamaged\t... and {len(found.damaged) - SHOWN} more (all with --json)")
    click.echo(
        f"{tier}\tverified\t{found.blocks:,} blocks, {format_bytes(found.nbytes)} in {duration(found.seconds)}: "
        f"{len(found.damaged)} damaged, {found.changed} changed or gone meanwhile"
    )


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
    owner: str | None
    """The process that owns the medium; None if there is none."""
    epochs: list[EpochContent]
    unreadable: int = 0
    """Number of places whose header is damaged or cannot be read; their blocks count nowhere else."""

    suspects: int = 0
    """Number of objects that a machine has noted as corrupt, and no other machine has confirmed."""
    hot_keys: int = 0
    """Number of engines whose published keys a warm start finds."""
    descriptions: int = 0
    """Number of documents that describe blocks for KV events after a restart."""
    differences: dict[str, list[str]] = field(default_factory=dict)
    """Parameters in which each namespace differs from the one that was written last."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks on the medium."""
        return sum(epoch.nbytes for epoch in self.epochs)


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
    return TierContent(
        admin.place,
        admin.owner(),
        ordered,
        admin.unreadable,
        admin.suspects,
        admin.hot_keys,
        admin.descriptions,
        _compared(known, ordered),
    )


def _compared(known: Mapping[str, KnownNamespace], epochs: Sequence[EpochContent]) -> dict[str, list[str]]:
    """Return the parameters in which each namespace differs from the one that was written last.

    Args:
        known: the namespaces by name; those without a document of their parameters are left out.
        epochs: the blocks on the medium.
    """
    written = {found.namespace: found.newest for found in sorted(epochs, key=lambda one: one.newest or 0.0)}
    readable = [name for name in written if name in known and known[name].parameters]
    if not readable:
        return {}
    last = known[readable[-1]].parameters
    return {name: differences(last, known[name].parameters) for name in readable[:-1]}


def _empty(known: Mapping[str, KnownNamespace], namespace: str, fingerprint: str) -> EpochContent:
    found = known.get(namespace)
    label = "unknown model" if found is None else found.label
    state = EpochState.ABANDONED if found is None else found.epochs.get(fingerprint, EpochState.ABANDONED)
    holder = "" if found is None else found.holders.get(fingerprint, "")
    return EpochContent(namespace, label, fingerprint, str(state), holder=holder)


def print_contents(contents: Mapping[str, TierContent]) -> None:
    """Print one table per tier on a terminal, lines of words between tabs otherwise."""
    console = stdout()
    headings = ("namespace", "model", "epoch", "state", "blocks", "bytes", "oldest", "newest")
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
        remarks = list(_remarks(content))
        if not console.is_terminal:
            for words in [*rows, *remarks]:
                click.echo("\t".join((tier, *words)))
            continue
        table = Table(title=f"{tier}: {content.place}", title_justify="left", caption_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="left" if number < 4 else "right")
        for row in rows:
            table.add_row(*row)
        owner = [] if content.owner is None else [f"in use by {content.owner}"]
        table.caption = "\n".join([*owner, *(text for _, text in remarks)]) or None
        console.print(table)


def _remarks(content: TierContent) -> Iterator[tuple[str, str]]:
    """Yield a word and a sentence for everything that is no block of an epoch."""
    if content.unreadable:
        text = "slots with a header that is damaged or cannot be read; engines treat them as empty"
        yield "unreadable", f"{content.unreadable:,} {text}"
    if content.suspects:
        text = "objects that one machine reads corrupt; run inspect with --verify on another machine"
        yield "suspects", f"{content.suspects:,} {text}"
    if content.hot_keys:
        yield "hot keys", f"{content.hot_keys:,} engines have published which blocks they use most, for a warm start"
    if content.descriptions:
        yield "descriptions", f"{content.descriptions:,} documents describe blocks for KV events, with their tokens"
    for namespace, texts in content.differences.items():
        yield "namespace", f"{namespace[:8]} differs from the one that was written last in {'; '.join(texts)}"
    for found in content.epochs:
        if found.holder:
            yield "lease", f"{found.fingerprint[:8]} is the epoch of {found.holder}"
