"""``check``: a stack is validated, and every tier is probed for real."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import click
import numpy as np
from rich.table import Table
from rich.text import Text

from tiering.admin.records import Finding, Severity
from tiering.admin.tier_admin import TierAdmin
from tiering.api.masking import mask_text
from tiering.api.units import format_bytes
from tiering.cli.driver import TierDriver, eager, scratch_key
from tiering.cli.machine import below_one_block, probe_machine
from tiering.cli.output import duration, print_json, stdout
from tiering.cli.parameters import SIZE, device_cache_option, json_option
from tiering.cli.tiers import ChosenTiers, chosen_tiers
from tiering.cli.verify import BlockVerifier
from tiering.errors import OutOfSpaceError, RegionError, TieringError
from tiering.secondary.options import TierOptions

ROUND_TRIP_BLOCKS = 4
"""Blocks that are stored and loaded again."""
ROUND_TRIP_SECONDS = 60.0
"""Seconds that the stores or the loads of a round trip may take."""
_LEAST_SCRATCH = 64 << 20

_STYLES = {Severity.OK: "green", Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}

PRIMARY = "primary"
"""Name of the section about the machine and the stack as a whole."""


@click.command()
@click.option(
    "--block-bytes",
    type=SIZE,
    default="2MiB",  # 16 tokens of an 8B model in bf16
    show_default=True,
    help="Size of an offloaded block, all layers and ranks together.",
)
@device_cache_option("not compared with the CPU tier")
@click.option("--strict", is_flag=True, help="Warnings make the exit code 1, too.")
@click.option("--no-round-trip", is_flag=True, help="Move no block through the tiers.")
@chosen_tiers()
@json_option
def check(
    chosen: ChosenTiers,
    block_bytes: int,
    device_cache: int | None,
    strict: bool,
    no_round_trip: bool,
    as_json: bool,
) -> int:
    """Validate STACK and probe every tier for real.

    Each tier stores and loads a few blocks at a scratch place of its own, which is removed again. A local directory
    that an engine uses is only read. The exit code is 0 if no error was found. STACK may also be a file (JSON or YAML)
    with vLLM's kv_transfer_config, SGLang's dictionary of a storage backend, or LMCache's of an L2 adapter, that names
    one stack.

    \b
    Examples:
      kv-tiering check stack.yaml
      kv-tiering check stack.yaml --block-bytes 8MiB --strict
      kv-tiering check stack.yaml --device-cache 40GiB
      kv-tiering check stack.yaml --json | jq '.findings[] | select(.severity == "error")'
    """
    found: list[tuple[str, Finding]] = []
    if not chosen.are_named:
        found += [(PRIMARY, finding) for finding in probe_machine(chosen.config, block_bytes, device_cache)]
    for options in chosen.tiers:
        probes = probe_tier(chosen, options, block_bytes, round_trip=not no_round_trip)
        found += [(options.tier_name, finding) for finding in probes]
    bad = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    failed = any(finding.severity in bad for _, finding in found)
    if as_json:
        findings = [{"tier": tier, **dataclasses.asdict(finding)} for tier, finding in found]
        print_json({"stack": chosen.path, "ok": not failed, "block_bytes": block_bytes, "findings": findings})
    else:
        _print(found)
    return int(failed)


def probe_tier(chosen: ChosenTiers, options: TierOptions, block_bytes: int, *, round_trip: bool) -> Iterator[Finding]:
    """Yield findings about one tier; a failure of a probe is a finding, too."""
    for text in chosen.conflicts(options):
        remedy = "give each tier a path of its own, and mind symbolic links and bind mounts"
        yield Finding(Severity.ERROR, "one directory", text, remedy)
    found: list[Finding] = []
    yield from _swapped(options)
    try:
        admin = chosen.admin(options)
        for finding in admin.check(block_bytes):
            found.append(finding)
            yield finding
        told = any(finding.subject == "capacity" for finding in found)
        if not told and options.capacity_bytes is not None and options.capacity_bytes < block_bytes:
            found.append(below_one_block(options.capacity_bytes, block_bytes))
            yield found[-1]
        failed = any(finding.severity is Severity.ERROR for finding in found)
        if not round_trip:
            return
        if _is_owned(admin, failed=failed):
            yield from asyncio.run(_read_some(admin))
        elif not failed:
            yield from _round_trip(admin, block_bytes)
    except RegionError as error:
        yield Finding(
            Severity.ERROR,
            "round trip",
            str(error),
            "give the real size of a block with --block-bytes, or leave the round trip out with --no-round-trip",
        )
    except TieringError as error:
        text, _, remedy = str(error).partition("; ")
        yield Finding(Severity.ERROR, "probe", text, remedy)
    except Exception as error:  # a custom tier may raise anything
        yield Finding(Severity.ERROR, "probe", f"{type(error).__name__}: {error}")


def _is_owned(admin: TierAdmin, *, failed: bool) -> bool:
    """Return True if a process owns the medium; a medium that failed may not be able to tell."""
    try:
        return admin.owner() is not None
    except TieringError:
        if failed:
            return False
        raise


_WAITS = (("retries", "backoff", "backoff_max"), ("breaker", "probe_after", "probe_max"))
"""Part of a tier's options, with the words for the beginning of a wait and for its bound."""


def _swapped(options: TierOptions) -> Iterator[Finding]:
    """Yield a warning for each wait whose bound is below its beginning."""
    for part, first, bound in _WAITS:
        words = getattr(options, part, None)
        if words is not None and getattr(words, first) > getattr(words, bound):
            yield Finding(
                Severity.WARNING,
                f"{part}.{first}",
                f"{duration(getattr(words, first))} is above {part}.{bound}, {duration(getattr(words, bound))}",
                f"swap the two values, or raise {part}.{bound}",
            )


def _round_trip(admin: TierAdmin, block_bytes: int) -> Iterator[Finding]:
    """Store blocks through the tier's own layers, and load them again."""
    count = ROUND_TRIP_BLOCKS
    keys = [scratch_key(number) for number in range(count)]
    with contextlib.ExitStack() as scratch:
        try:
            options = scratch.enter_context(admin.scratch(max(_LEAST_SCRATCH, 8 * (block_bytes + 8192))))
        except OutOfSpaceError as full:
            text = f"no block was moved: {full}"
            yield Finding(Severity.WARNING, "round trip", text, "free some space, or use --no-round-trip")
            return
        if options is None:
            yield Finding(Severity.INFO, "round trip", "the tier has no scratch place; no block was moved")
            return
        # Admission, second touches above all, must not keep the blocks from the medium.
        with TierDriver(eager(options), block_bytes, 2 * count) as driver:
            content = np.random.default_rng().integers(0, 256, (count, block_bytes), np.uint8)
            driver.rows[:count, :block_bytes] = content
            began = time.monotonic()
            stored = driver.move(keys, range(count), load=False, timeout=ROUND_TRIP_SECONDS)
            between = time.monotonic()
            loaded = driver.move(stored, range(count, count + len(stored)), load=True, timeout=ROUND_TRIP_SECONDS)
            ended = time.monotonic()
            back = driver.rows[count : count + len(stored), :block_bytes]
            same = len(loaded) == count and bool(np.array_equal(back, content))
            error = driver.tier.open_error
    text = (
        f"{count} blocks of {format_bytes(block_bytes)}: stored in {duration(between - began)}, "
        f"loaded in {duration(ended - between)}"
    )
    if len(loaded) == count and not same:
        yield Finding(
            Severity.ERROR, "round trip", f"{text}, and they differ", "do not use this machine's memory and this tier"
        )
    elif same:
        yield Finding(Severity.OK, "round trip", f"{text}, identical")
    else:
        yield Finding(
            Severity.ERROR,
            "round trip",
            f"{len(stored)} of {count} blocks were stored, {len(loaded)} loaded" + (f": {error}" if error else ""),
            "repeat with --verbose, which shows the log",
        )


async def _read_some(admin: TierAdmin) -> list[Finding]:
    """Verify a few blocks of a medium that an engine uses."""
    outcomes: list[str] = []
    with admin:
        verifier = BlockVerifier(admin)
        async for block in admin.blocks():
            if len(outcomes) == ROUND_TRIP_BLOCKS:
                break
            outcomes += [outcome for outcome in await verifier.verify([block]) if outcome is not None]
    read, damaged = len(outcomes), sum(map(bool, outcomes))
    if damaged:
        return [
            Finding(
                Severity.ERROR,
                "blocks",
                f"{damaged} of {read} blocks are damaged",
                "run kv-tiering inspect --verify, and look at the disk",
            )
        ]
    return [Finding(Severity.OK, "blocks", f"{read} blocks read, intact")]


def _print(found: Sequence[tuple[str, Finding]]) -> None:
    console = stdout()
    if not console.is_terminal:
        for tier, finding in found:
            words = (tier, finding.severity, finding.subject, finding.text, finding.remedy)
            click.echo(mask_text("\t".join(words).rstrip()))
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    section = None
    for tier, finding in found:
        if tier != section:
            table.add_row(Text(tier, style="bold"))
            section = tier
        text = Text(mask_text(finding.text))
        if finding.remedy:
            text.append(f"\n→ {mask_text(finding.remedy)}", style="italic")
        table.add_row(Text(f"  {finding.severity}", style=_STYLES[finding.severity]), Text(finding.subject), text)
    console.print(table)
    counts = [
        f"{number} {name}{'' if number == 1 else 's'}"
        for name, severity in (("error", Severity.ERROR), ("warning", Severity.WARNING))
        if (number := sum(finding.severity is severity for _, finding in found))
    ]
    console.print(", ".join(counts) or "nothing wrong")
