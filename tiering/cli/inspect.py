"""``inspect``: the content of tiers, and the verification of every checksum."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.cli.contents import TierContent, print_contents, read_content
from tiering.cli.output import duration, print_json
from tiering.cli.parameters import SIZE, json_option, secondary_tiers, stack_argument, tier_options
from tiering.cli.tiers import conflicts_with_earlier, for_each_tier, note
from tiering.cli.verify import Resumable, Verified, verify_tier

_CPU_TIER = "its blocks end with the engine; kv-tiering top shows them while the engine runs"

SHOWN = 20
"""Damaged blocks that are listed for each tier without ``--json``."""


@click.command(name="inspect")
@stack_argument
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
@tier_options
@json_option
def inspect_command(
    stack: str,
    verify: bool,
    rate: int | None,
    concurrency: int,
    state: Path | None,
    tiers: tuple[str, ...],
    replica: str | None,
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
    config, chosen = secondary_tiers(stack, tiers, _CPU_TIER)
    for options in chosen:
        for reason in conflicts_with_earlier(options, config.secondary, replica):
            note(options.tier_name, f"{reason}, and the blocks of this directory are counted twice")
    progress = Resumable(state, stack) if verify else None

    async def work(admin: TierAdmin) -> tuple[TierContent, Verified | None]:
        content = await read_content(admin)
        if progress is None:
            return content, None
        return content, await verify_tier(admin, content, progress, rate=rate, concurrency=concurrency)

    results, code = for_each_tier(chosen, replica, work)
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
