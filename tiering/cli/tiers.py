"""Work on the chosen tiers of a stack; each problem is one line."""

from __future__ import annotations

import asyncio
import contextlib
import string
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

from tiering.admin.records import KnownNamespace, UnsupportedError
from tiering.admin.tier_admin import TierAdmin
from tiering.api.masking import mask_text
from tiering.cli.parameters import admin_of
from tiering.errors import ConfigError, TieringError
from tiering.secondary.options import TierOptions

DRY_RUN = 3
"""Exit code of a dry run that would have changed something."""
LEAST_PREFIX = 4
"""Hex digits that the beginning of a namespace must have at least."""


def for_each_tier(
    chosen: Sequence[TierOptions], replica: str | None, work: Callable[[TierAdmin], Awaitable[Any]]
) -> tuple[dict[str, Any], int]:
    """Run ``work`` on the administration of each tier, open.

    Args:
        chosen: options of the tiers.
        replica: name of the data-parallel replica, or None.
        work: the work on one tier.

    Returns:
        The results by name of the tier, and the exit code. Tiers that failed have no result and make the code 1.
        Tiers that do not support the work have none either, and make the code 1 if no tier does.
    """
    results: dict[str, Any] = {}
    failed, unsupported = False, 0

    async def run(admin: TierAdmin) -> Any:
        return await work(admin)

    for options in chosen:
        try:
            with admin_of(options, replica) as admin:
                results[options.tier_name] = asyncio.run(run(admin))
        except UnsupportedError as error:
            unsupported += 1
            note(options.tier_name, str(error))
        except ConfigError:
            raise
        except TieringError as error:
            failed = True
            note(options.tier_name, str(error))
    return results, int(failed or (unsupported == len(chosen) > 0))


def conflicts_with_earlier(options: TierOptions, every: Sequence[TierOptions], replica: str | None) -> list[str]:
    """Return why an engine cannot use a tier beside tiers before it in the stack; empty if it can.

    Args:
        options: options of the tier.
        every: options of all secondary tiers of the stack, in its order.
        replica: name of the data-parallel replica, or None.
    """
    reasons: list[str] = []
    for other in every[: list(every).index(options)]:
        # A custom tier may raise anything. The work on a tier that cannot be administered tells why.
        with contextlib.suppress(Exception):
            reasons += filter(None, [admin_of(options, replica).conflict(admin_of(other, replica))])
    return reasons


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
