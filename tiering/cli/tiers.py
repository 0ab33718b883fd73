"""Work on the chosen tiers of a stack; each problem is one line."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import string
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, cast

import click

from tiering.admin.records import KnownNamespace, UnsupportedError
from tiering.admin.tier_admin import TierAdmin
from tiering.api.masking import mask_text
from tiering.cli.parameters import Command, stack_argument
from tiering.cli.transfer_config import stack_at
from tiering.config.registry import tier_definition
from tiering.config.stack_file import StackConfig
from tiering.errors import ConfigError, TieringError
from tiering.secondary.options import TierOptions

DRY_RUN = 3
"""Exit code of a dry run that would have changed something."""
LEAST_PREFIX = 4
"""Hex digits that the beginning of a namespace must have at least."""


@dataclass(frozen=True, slots=True)
class ChosenTiers:
    """The tiers behind the CPU tier that a command works on."""

    path: str
    """The stack file, as the user has named it."""
    config: StackConfig
    """The whole stack."""
    tiers: Sequence[TierOptions]
    """Options of the chosen tiers, in the order of the stack."""
    replica: str | None
    """Name of the data-parallel replica, or None."""
    are_named: bool
    """True if ``--tier`` has chosen them; False: they are all those of the stack."""

    def admin(self, options: TierOptions) -> TierAdmin:
        """Return the administration of a tier.

        Raises:
            ConfigError: the tier cannot be administered with these options on this machine.
        """
        return tier_definition(options.type).admin(options, self.replica)

    def for_each(
        self,
        work: Callable[[TierAdmin], Coroutine[Any, Any, Any]],
        some: Sequence[TierOptions] | None = None,
        *,
        opened: bool = True,
    ) -> tuple[dict[str, Any], int]:
        """Run ``work`` on the administration of each tier.

        Args:
            work: the work on one tier.
            some: options of the tiers; default: all chosen ones.
            opened: False if the medium need not exist yet; default: True.

        Returns:
            The results by name of the tier, and the exit code. Tiers that failed have no result and make the code 1.
            Tiers that do not support the work have none either, and make the code 1 if no tier does.
        """
        results: dict[str, Any] = {}
        failed, unsupported = False, 0
        tiers = self.tiers if some is None else some

        for options in tiers:
            try:
                admin = self.admin(options)
                with admin if opened else contextlib.nullcontext():
                    results[options.tier_name] = asyncio.run(work(admin))
            except UnsupportedError as error:
                unsupported += 1
                note(options.tier_name, str(error))
            except ConfigError:
                raise
            except TieringError as error:
                failed = True
                note(options.tier_name, str(error))
        return results, int(failed or (unsupported == len(tiers) > 0))

    def conflicts(self, options: TierOptions) -> list[str]:
        """Return why an engine cannot use a tier beside tiers before it in the stack; empty if it can."""
        reasons: list[str] = []
        every = self.config.secondary
        for other in every[: every.index(options)]:
            # A custom tier may raise anything. The work on a tier that cannot be administered tells why.
            with contextlib.suppress(Exception):
                reasons += filter(None, [self.admin(options).conflict(self.admin(other))])
        return reasons


def chosen_tiers(cpu_tier: str | None = None) -> Callable[[Command], Command]:
    """Add STACK, ``--tier`` and ``--replica``; a command gets their tiers as the argument ``chosen``.

    A stack that is invalid, or that lacks a tier of a given name, is refused.

    Args:
        cpu_tier: what the user of a stack without secondary tiers can do instead, as the end of a sentence; default:
            the command needs no such tier.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def choose(*, stack: str, tiers: Sequence[str], replica: str | None, **words: Any) -> Any:
            config = stack_at(stack)
            known = [options.tier_name for options in config.secondary]
            for name in tiers:
                if name not in known:
                    raise ConfigError(
                        f"--tier: the stack has no tier {name!r}; it has {', '.join(known) or 'no tiers'}"
                    )
            chosen = [options for options in config.secondary if not tiers or options.tier_name in tiers]
            if cpu_tier is not None and not chosen:
                raise TieringError(f"{stack} has only the CPU tier: {cpu_tier}")
            return command(chosen=ChosenTiers(stack, config, chosen, replica, bool(tiers)), **words)

        replica = click.option("--replica", metavar="NAME", help="Data-parallel replica whose directory is meant.")
        tier = click.option(
            "--tier", "tiers", multiple=True, metavar="NAME", help="Only this tier of the stack; may be given again."
        )
        return cast("Command", stack_argument(tier(replica(choose))))

    return decorate


def note(tier: str, text: str) -> None:
    """Print one line about a tier on stderr."""
    click.echo(f"kv-tiering: {tier}: {mask_text(text)}", err=True)


def unchanged(question: str, *, yes: bool, dry_run: bool) -> int | None:
    """Return the exit code of a command that changes nothing; None: the user agrees to the change.

    Args:
        question: question to ask on a terminal.
        yes: True if the user gave ``--yes``.
        dry_run: True if the user gave ``--dry-run``, or the command cannot ask.
    """
    if yes:
        return None
    if sys.stdin.isatty() and sys.stdout.isatty() and not dry_run:
        return None if click.confirm(question, default=False) else 0
    click.echo("kv-tiering: dry run: nothing changed; repeat with --yes", err=True)
    return DRY_RUN


def choose_namespaces(known: Sequence[KnownNamespace], name: str | None, place: str) -> list[KnownNamespace]:
    """Return those of the ``known`` namespaces whose names begin with ``name``; None: all.

    Args:
        known: the namespaces.
        name: beginning of a name, or None.
        place: place that holds the namespaces, for the error.

    Raises:
        ConfigError: no namespace, or more than one, begins with ``name``.
    """
    if name is None:
        return list(known)
    found = [namespace for namespace in known if namespace.name.startswith(name.lower())]
    if len(name) < LEAST_PREFIX or len(found) != 1:
        names = ", ".join(f"{namespace.name[:8]} ({namespace.label})" for namespace in known) or "none"
        fault = "is too short" if len(name) < LEAST_PREFIX else "names none" if not found else "names several"
        if not set(name) <= set(string.hexdigits):
            fault = "is not hexadecimal"
        raise ConfigError(f"--namespace: {name!r} {fault}; {place} holds {names}")
    return found
