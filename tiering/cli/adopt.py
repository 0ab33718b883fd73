"""``adopt``: the directories that engines had, for the service of their machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import click

from tiering.admin.records import Adopted
from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.cli.output import print_json
from tiering.cli.parameters import change_options, json_option
from tiering.cli.tiers import ChosenTiers, chosen_tiers, unchanged


@click.command()
@change_options
@chosen_tiers("it has no directories")
@json_option
@click.argument("directories", metavar="DIRECTORY...", nargs=-1, required=True)
def adopt(chosen: ChosenTiers, directories: Sequence[str], yes: bool, dry_run: bool, as_json: bool) -> int:
    """Give directories that engines had to the service of STACK.

    A DIRECTORY is the path of a local tier in the engines' stacks, or several, with the subdirectories of data-parallel
    replicas. Of each namespace, the fullest becomes the service's, with its blocks, unless the service has stored some
    already. The others are removed. Those in use by an engine stay, and so do those of other users than the command's,
    and files of somebody else.

    Without --yes, only a terminal is asked; pipes get a dry run. A dry run that would have changed something ends with
    code 3.

    \b
    Examples:
      kv-tiering adopt service.yaml /var/cache/kv --dry-run
      kv-tiering adopt service.yaml /var/cache/kv-0 /var/cache/kv-1 --tier local --yes
    """
    if yes and dry_run:
        raise click.UsageError("give either --yes or --dry-run")

    def work(dry: bool) -> tuple[dict[str, list[Adopted]], int]:
        async def each(admin: TierAdmin) -> list[Adopted]:
            return list(admin.adopt(directories, dry_run=dry))

        return chosen.for_each(each, opened=False)

    results, code = work(not yes)
    _print(results, changed=yes, as_json=as_json)
    if yes or not any(found.nbytes for tier in results.values() for found in tier):
        return code
    stop = unchanged("Do that?", yes=False, dry_run=dry_run or as_json)
    if stop is not None:
        return code or stop
    results, failed = work(False)
    _print(results, changed=True, as_json=False)
    return code or failed


def _print(results: dict[str, list[Adopted]], *, changed: bool, as_json: bool) -> None:
    if as_json:
        print_json(
            {tier: [{**dataclasses.asdict(one), "dry_run": not changed} for one in results[tier]] for tier in results}
        )
        return
    for tier, found in results.items():
        for one in found:
            about = [one.namespace[:8]] * bool(one.namespace) + [format_bytes(one.nbytes)] * bool(one.nbytes)
            click.echo(" ".join([f"{tier}\t{one.place}", *([f"({', '.join(about)})"] if about else []), one.fate]))
