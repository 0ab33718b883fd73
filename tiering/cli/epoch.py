"""``epoch new``: the beginning of a new common epoch, in which the tiers are empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from tiering.admin.records import KnownNamespace
from tiering.admin.tier_admin import TierAdmin
from tiering.cli.parameters import change_options, namespace_options
from tiering.cli.tiers import ChosenTiers, choose_namespaces, chosen_tiers, note, unchanged
from tiering.epochs.documents import new_invalidation
from tiering.errors import StoreError, TemporaryStoreError
from tiering.secondary.options import SharedOptions, TierOptions

_BEGUN = "a new epoch has begun; "

_OLDER = (
    "kv-tiering: note: upgrade all engines first: one of an earlier version that starts later may bring older blocks "
    "back; then repeat the command"
)

_CPU_TIER = "it has no epochs; reset the caches of the engine, or restart the engine"


@dataclass(frozen=True)
class _Content:
    """Namespaces on one tier's medium."""

    place: str
    namespaces: list[KnownNamespace]
    watch_seconds: float


async def _content(admin: TierAdmin) -> _Content:
    return _Content(admin.place, await admin.namespaces(), admin.watch_seconds)


@click.group(invoke_without_command=True)
@click.pass_context
def epoch(context: click.Context) -> None:
    """Begin new epochs.

    \b
    Example:
      kv-tiering epoch new stack.yaml --namespace 5f0c2d1e --yes
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@epoch.command()
@namespace_options("Begin new epochs of all namespaces.")
@change_options
@chosen_tiers(_CPU_TIER)
def new(
    chosen: ChosenTiers,
    namespace: str | None,
    everything: bool,
    yes: bool,
    dry_run: bool,
) -> int:
    """Begin a new epoch of a namespace: blocks stored before are not served any more.

    A new epoch concerns all shared tiers of the stack (buckets, pools): --tier leaves none of them out. Engines that
    run follow within a minute, and empty their CPU tiers and disks as well. Engines that do not run do the same at
    their next start. Engines in an epoch of their own (after reset_cache, or with a revision) stay there: give them
    another revision. On a local disk, no engine may use the directory. The old blocks remain until kv-tiering gc
    removes them.

    Without --yes, only a terminal is asked; pipes get a dry run. A dry run that would have changed something ends
    with code 3.

    A pool is watched for a minute, because its server may lose its memory. If a shared tier cannot be reached, engines
    of the stack begin the epoch there as soon as they reach it. The command may be repeated at any time.

    \b
    Examples:
      kv-tiering epoch new stack.yaml --namespace 5f0c2d1e --dry-run
      kv-tiering epoch new stack.yaml --all --yes
    """
    config, named = chosen.config, chosen.tiers
    if (namespace is None) != everything:
        raise click.UsageError("give either --namespace or --all")
    if yes and dry_run:
        raise click.UsageError("give either --yes or --dry-run")
    shared = [options for options in config.secondary if isinstance(options, SharedOptions)]
    # Without the epoch, one shared tier would bring older blocks back into the others.
    every = config.revision is None and any(options in shared for options in named)
    concerned = [options for options in config.secondary if options in named or (every and options in shared)]
    contents, code = chosen.for_each(_content, concerned)
    if not contents:
        return code
    known = {item.name: item for content in contents.values() for item in content.namespaces}
    places = ", ".join(content.place for content in contents.values())
    names = {item.name for item in choose_namespaces(list(known.values()), namespace, places)}
    going: list[TierOptions] = []
    for options in concerned:
        if content := contents.get(options.tier_name):
            found = [f"{item.name[:8]} ({item.label})" for item in content.namespaces if item.name in names]
            click.echo(f"{options.tier_name}\t{', '.join(found) or 'no namespace'}")
            if found:
                going.append(options)
    lost = every and not any(options in shared for options in going)
    if lost:
        for options in shared:
            if options.tier_name in contents:
                note(
                    options.tier_name,
                    "holds no namespace whose epoch could begin; if it has lost its documents, engines that run write "
                    "them again within 30 s, with the older epoch: repeat the command in a minute",
                )
    stay = [] if config.revision is None else [options for options in going if options in shared]
    for options in stay:
        note(
            options.tier_name,
            "the stack has a revision, whose blocks a new epoch does not concern: "
            "its engines serve them until the stack has another revision",
        )
    code = code or int(lost or bool(stay))
    if not going:
        return code
    stop = unchanged("Begin a new epoch, without the blocks stored so far?", yes=yes, dry_run=dry_run)
    if stop is not None:
        return code or stop
    if any(options in shared for options in going):
        click.echo(_OLDER, err=True)
    # Buckets keep the epoch, so they come first. A pool may lose it, and is watched last.
    going.sort(key=lambda options: (contents[options.tier_name].watch_seconds, options not in shared))
    begun, failed = _begin(chosen, going, names)
    if every and begun:
        for options in shared:
            if options.tier_name not in begun and (options in going or options.tier_name not in contents):
                note(
                    options.tier_name,
                    "has no new epoch yet: engines of the stack begin it there as soon as they reach this tier and one "
                    "that has it; if none runs, repeat the command",
                )
    return code or failed


def _begin(chosen: ChosenTiers, going: Sequence[TierOptions], names: set[str]) -> tuple[dict[str, None], int]:
    """Begin the epochs on the media of ``going``; return the tiers that succeeded, and the exit code."""
    invalidation = new_invalidation()

    async def begin(admin: TierAdmin) -> None:
        found = [item.name for item in await admin.namespaces() if item.name in names]
        if not found:
            raise TemporaryStoreError("its documents have gone meanwhile; repeat the command in a minute")
        left: dict[str, StoreError] = {}
        for name in found:
            try:
                sentence = await admin.begin_epoch(name, invalidation)
            except StoreError as error:
                left[name] = error
                continue
            told = "has no epoch here, so there is nothing to begin" if sentence is None else _BEGUN + sentence
            click.echo(f"{admin.name}\t{name[:8]}: {told}")
        for name, reason in left.items():
            note(admin.name, f"{name[:8]}: no new epoch has begun: {reason}")
            found.remove(name)
        if admin.watch_seconds and found:
            note(
                admin.name,
                f"watches over the new epoch for {admin.watch_seconds:.0f} s, because the server may lose its memory "
                "before all engines have noticed",
            )
            await admin.watch_epochs(found, invalidation)
        if left:
            raise TemporaryStoreError(f"{len(left)} namespace(s) have no new epoch yet; repeat the command")

    return chosen.for_each(begin, going)
