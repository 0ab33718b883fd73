"""``epoch new``: the beginning of a new common epoch, in which a tier is empty."""

from __future__ import annotations

import click

from tiering.cli.parameters import secondary_tiers, stack_argument, tier_options
from tiering.cli.remove import dry_run_option, yes_option
from tiering.cli.tiers import agreed, for_each_tier, named_namespaces, note
from tiering.secondary.admin.contract import TierAdmin
from tiering.secondary.options import SharedOptions

_CPU_TIER = "it has no epochs; reset the caches of the engine, or restart the engine"


@click.group(invoke_without_command=True)
@click.pass_context
def epoch(context: click.Context) -> None:
    """Begin new epochs.

    \b
    Example:
      kv-tiering epoch new stack.yaml --tier s3 --namespace 5f0c2d1e
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@epoch.command()
@stack_argument
@click.option("--namespace", metavar="HEX", help="Beginning of the namespace's name, as in kv-tiering inspect.")
@click.option("--all", "everything", is_flag=True, help="Begin new epochs of all namespaces.")
@yes_option
@dry_run_option
@tier_options
def new(
    stack: str,
    namespace: str | None,
    everything: bool,
    yes: bool,
    dry_run: bool,
    tiers: tuple[str, ...],
    replica: str | None,
) -> int:
    """Begin a new epoch of a namespace: blocks stored before are not served from the tier any more.

    In a bucket, engines that run follow within a minute, and empty their CPU tiers and disks as well. Engines in an
    epoch of their own (after reset_cache, or with a revision) stay there: give them another revision. Engines that do
    not run do the same at their next start. On a local disk, no engine may use the directory. The old blocks remain
    until kv-tiering gc removes them.

    \b
    Example:
      kv-tiering epoch new stack.yaml --tier s3 --namespace 5f0c2d1e
    """
    if (namespace is None) != everything:
        raise click.UsageError("give either --namespace or --all")
    if yes and dry_run:
        raise click.UsageError("give either --yes or --dry-run")
    config, chosen = secondary_tiers(stack, tiers, _CPU_TIER)

    async def find(admin: TierAdmin) -> list[str]:
        found = await named_namespaces(admin, namespace)
        return [f"{item.name[:8]} ({item.label})" for item in found]

    async def begin(admin: TierAdmin) -> list[tuple[str, str]]:
        found = await named_namespaces(admin, namespace)
        return [(item.name[:8], await admin.begin_epoch(item.name)) for item in found]

    results, code = for_each_tier(chosen, replica, find)
    for tier, names in results.items():
        click.echo(f"{tier}\t{', '.join(names) or 'no namespace'}")
    going = [options for options in chosen if results.get(options.tier_name)]
    stay = [] if config.revision is None else [options for options in going if isinstance(options, SharedOptions)]
    for options in stay:
        note(
            options.tier_name,
            "the stack has a revision, whose blocks a new epoch does not concern: "
            "its engines serve them until the stack has another revision",
        )
    if not going or dry_run or not agreed("Begin a new epoch, without the blocks stored so far?", yes=yes):
        return code or int(bool(stay))
    begun, failed = for_each_tier(going, replica, begin)
    for tier, sentences in begun.items():
        for name, sentence in sentences:
            click.echo(f"{tier}\t{name}: a new epoch has begun; {sentence}")
    return code or failed or int(bool(stay))
