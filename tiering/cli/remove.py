"""``gc`` and ``clear``: the removal of blocks, as a dry run until the user agrees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import click

from tiering.admin.records import Collected, Limits
from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.cli.output import print_json
from tiering.cli.parameters import DURATION, SIZE, change_options, json_option, namespace_options
from tiering.cli.tiers import ChosenTiers, choose_namespaces, chosen_tiers, note, unchanged

_CPU_TIER = "its blocks end with the engine, so there is nothing to remove"

Removal = Callable[[TierAdmin, bool], Coroutine[Any, Any, Collected]]
"""Function that removes blocks of a tier, or counts them if its second argument (a dry run) is True."""


@click.command()
@click.option("--older-than", type=DURATION, metavar="DURATION", help="Remove blocks above this age.")
@click.option(
    "--max-total",
    type=SIZE,
    metavar="SIZE",
    help="Remove the oldest blocks until no more than this remains, tails of prefixes before their heads.",
)
@click.option(
    "--grace",
    type=DURATION,
    default="1d",
    show_default=True,
    metavar="DURATION",
    help="Keep younger blocks and leases of abandoned epochs.",
)
@change_options
@chosen_tiers(_CPU_TIER)
@json_option
def gc(
    chosen: ChosenTiers,
    older_than: float | None,
    max_total: int | None,
    grace: float,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove blocks that no engine serves any more from the tiers of STACK.

    These are blocks of epochs that neither an epoch document nor a fresh lease names. --older-than and --max-total
    remove more. In a bucket, single blocks go while engines run. On a local disk, whole segments go, and no engine may
    use the directory.

    Without --yes, only a terminal is asked; pipes get a dry run. A dry run that would have removed something ends with
    code 3.

    In a bucket, blocks older than the tier's ttl go as well, and one collection runs at a time. The memory that it
    takes does not depend on the number of blocks.

    \b
    Examples:
      kv-tiering gc stack.yaml --dry-run
      kv-tiering gc stack.yaml --yes
      kv-tiering gc stack.yaml --tier s3 --older-than 30d --yes
      kv-tiering gc stack.yaml --tier s3 --max-total 10TB --yes
    """
    limits = Limits(abandoned=True, older_than=older_than, max_total=max_total, grace=grace)

    async def remove(admin: TierAdmin, dry_run: bool) -> Collected:
        return await admin.collect(limits, dry_run=dry_run)

    return _run(chosen, remove, yes=yes, dry_run=dry_run, as_json=as_json)


@click.command()
@namespace_options("Clear all namespaces, and abandoned epochs.")
@change_options
@chosen_tiers(_CPU_TIER)
@json_option
def clear(
    chosen: ChosenTiers,
    namespace: str | None,
    everything: bool,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove all blocks of a namespace from the tiers of STACK.

    In a bucket, engines that run see misses and store again. On a local disk, no engine may use the directory: the
    namespace begins a new epoch, and segments without other blocks are deleted. To let engines drop blocks that are
    wrong, use kv-tiering epoch new instead.

    Without --yes, only a terminal is asked; pipes get a dry run. A dry run that would have removed something ends with
    code 3.

    \b
    Examples:
      kv-tiering clear stack.yaml --tier s3 --namespace 5f0c2d1e --dry-run
      kv-tiering clear stack.yaml --all --yes
    """
    if (namespace is None) != everything:
        raise click.UsageError("give either --namespace or --all")

    async def remove(admin: TierAdmin, dry_run: bool) -> Collected:
        named = choose_namespaces(await admin.namespaces(), namespace, admin.place)
        done: list[Collected] = []
        if everything:
            # Blocks of abandoned epochs may belong to no namespace that the medium still names. They go first: if
            # another collection runs, nothing is removed at all.
            done.append(await admin.collect(Limits(abandoned=True, grace=0.0), dry_run=dry_run))
        done += [await admin.clear(found.name, dry_run=dry_run) for found in named]
        return Collected(
            max((one.blocks for one in done), default=0),
            max((one.nbytes for one in done), default=0),
            sum(one.removed_blocks for one in done),
            sum(one.removed_bytes for one in done),
        )

    return _run(chosen, remove, yes=yes, dry_run=dry_run, as_json=as_json)


def _run(chosen: ChosenTiers, remove: Removal, *, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Count first, unless the user has agreed already; then ask, and remove."""
    if yes and dry_run:
        raise click.UsageError("give either --yes or --dry-run")
    incomplete: dict[str, dict[str, object]] = {}

    async def really(admin: TierAdmin) -> Collected:
        try:
            return await remove(admin, False)
        except BaseException as error:
            if admin.removed_blocks:
                size = format_bytes(admin.removed_bytes)
                note(admin.name, f"removed {admin.removed_blocks:,} blocks, {size}, before it ended early")
            incomplete[admin.name] = {
                "removed_blocks": admin.removed_blocks,
                "removed_bytes": admin.removed_bytes,
                "dry_run": False,
                "error": str(error) or type(error).__name__,
            }
            raise

    if yes:
        results, code = chosen.for_each(really)
        _print(results, incomplete, removed=True, as_json=as_json)
        return code
    results, code = chosen.for_each(lambda admin: remove(admin, True))
    _print(results, incomplete, removed=False, as_json=as_json)
    going = {tier for tier, found in results.items() if found.removed_blocks or found.removed_bytes}
    if not going:
        return code
    stop = unchanged("Remove them?", yes=False, dry_run=dry_run or as_json)
    if stop is not None:
        return code or stop
    again = [options for options in chosen.tiers if options.tier_name in going]
    results, failed = chosen.for_each(really, again)
    _print(results, incomplete, removed=True, as_json=False)
    return code or failed


def _print(
    results: Mapping[str, Collected],
    incomplete: Mapping[str, Mapping[str, object]],
    *,
    removed: bool,
    as_json: bool,
) -> None:
    """Print the results of the tiers; ``incomplete`` has those of removals that failed half-way."""
    if as_json:
        whole = {tier: {**dataclasses.asdict(found), "dry_run": not removed} for tier, found in results.items()}
        print_json({**whole, **incomplete})
        return
    verb = "removed" if removed else "would remove"
    for tier, found in results.items():
        click.echo(
            f"{tier}\t{verb} {found.removed_blocks:,} of {found.blocks:,} blocks, "
            f"{format_bytes(found.removed_bytes)} of {format_bytes(found.nbytes)}"
        )
