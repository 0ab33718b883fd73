"""``bench``: bandwidth, latency and cost of each tier, and the break-even with recomputing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import click
from rich.progress import TimeElapsedColumn
from rich.table import Table

from tiering.admin.tier_admin import TierAdmin
from tiering.api.units import format_bytes
from tiering.cli.measure import Limit, Measured, Plan, measure_tier
from tiering.cli.output import duration, print_json, progress, rate, stdout
from tiering.cli.parameters import DURATION, SIZE, Number, json_option
from tiering.cli.tiers import ChosenTiers, chosen_tiers, note
from tiering.errors import OutOfSpaceError, RegionError, TieringError

DEFAULT_SIZES = ("512KiB", "2MiB", "8MiB")
DEFAULT_DEPTHS = (1, 4, 16)
_CPU_TIER = (
    "bench measures the tiers behind it; for the copies between GPU and memory, an engine's metrics "
    "vllm:kv_offload_total_bytes and vllm:kv_offload_total_time tell the bandwidth"
)


@dataclasses.dataclass(frozen=True, slots=True)
class BreakEven:
    """The shortest prefix of one size of blocks whose load is faster than its prefill."""

    tier: str
    """Name of the tier, as in the stack file."""
    block_bytes: int
    """Bytes of a block, without header and padding."""
    first_block: float
    """Seconds until one block alone is loaded."""
    bytes_per_second: float
    """Best bandwidth of loads."""
    blocks: int | None
    """Blocks of the prefix, for ``min_prefix_blocks``; None: no load is faster than the prefill."""
    tokens: int | None
    runs: int = 1
    """Runs of the measurement with the best bandwidth."""
    limit: float | None = None
    """Bandwidth of the bare device in that measurement; None if it was not measured."""


@click.command()
@click.option(
    "--block-bytes",
    "sizes",
    type=SIZE,
    multiple=True,
    default=DEFAULT_SIZES,
    show_default=True,
    help="Size of a block; may be given again.",
)
@click.option(
    "--depth",
    "depths",
    type=click.IntRange(1, 256),
    multiple=True,
    default=DEFAULT_DEPTHS,
    show_default=True,
    help="Blocks in flight; may be given again.",
)
@click.option("--bytes", "nbytes", type=SIZE, default="256MiB", show_default=True, help="Bytes of one measurement.")
@click.option("--seconds", type=DURATION, default="3s", show_default=True, help="Longest time of one measurement.")
@click.option("--prefill-tokens-per-second", type=Number(min=0, min_open=True), help="Speed of recomputing.")
@click.option("--bytes-per-token", type=SIZE, help="KV of one token, all layers and ranks together.")
@click.option("--no-device", is_flag=True, help="Do not measure the bare device.")
@chosen_tiers(_CPU_TIER)
@json_option
def bench(
    chosen: ChosenTiers,
    sizes: tuple[int, ...],
    depths: tuple[int, ...],
    nbytes: int,
    seconds: float,
    prefill_tokens_per_second: float | None,
    bytes_per_token: int | None,
    no_device: bool,
    as_json: bool,
) -> int:
    """Measure what each tier of STACK does on this machine.

    Blocks are stored and loaded through all layers of the tier, at a scratch place that is removed afterwards. A local
    directory that an engine uses is not measured. A bucket is charged for the requests. The limit is that of the bare
    device with the same access.

    With the two options about tokens, the break-even is the shortest prefix that is loaded faster than it is computed;
    set min_prefix_blocks to its blocks.

    \b
    Examples:
      kv-tiering bench stack.yaml
      kv-tiering bench stack.yaml --tier local --block-bytes 2MiB --depth 8
      kv-tiering bench stack.yaml --prefill-tokens-per-second 8000 --bytes-per-token 128KiB
    """
    if (prefill_tokens_per_second is None) != (bytes_per_token is None):
        raise click.UsageError("--prefill-tokens-per-second and --bytes-per-token: give both or neither")
    plan = Plan(sizes, depths, nbytes, seconds)
    measured: list[Measured] = []
    failed = False
    with progress(TimeElapsedColumn()) as bar:
        task = bar.add_task("")
        for options in chosen.tiers:
            bar.update(task, description=options.tier_name)
            try:
                admin = chosen.admin(options)
                owner = admin.owner()
                if owner is not None:
                    failed = True
                    note(admin.name, f"in use by {owner}, which a measurement would disturb; stop it first")
                    continue
                for found in measure_tier(admin, plan, None if no_device else _limit(admin, plan)):
                    measured.append(found)
                    bar.update(task, description=_line(found))
            except TieringError as error:
                failed = True
                note(options.tier_name, f"{error}{_remedy(error)}")
    pays: list[BreakEven] = []
    if prefill_tokens_per_second is not None and bytes_per_token is not None:
        pays = break_evens(measured, prefill_tokens_per_second, bytes_per_token)
    if as_json:
        print_json(
            {
                "measured": [found.to_json() for found in measured],
                "break_even": [dataclasses.asdict(found) for found in pays],
            }
        )
    else:
        _print(measured, pays)
    return int(failed)


def _remedy(error: TieringError) -> str:
    """Return how to make the measurement smaller, if it is too large for memory or disk."""
    if isinstance(error, RegionError):
        return "; give a smaller --block-bytes or --depth"
    if isinstance(error, OutOfSpaceError):
        return "; free some space, or give a smaller --block-bytes, --depth or --bytes"
    return ""


def _limit(admin: TierAdmin, plan: Plan) -> Limit:
    def limit(block_bytes: int, depth: int, load: bool) -> float | None:
        return admin.device_limit(block_bytes, depth, load=load, nbytes=plan.nbytes, seconds=plan.seconds)

    return limit


def break_evens(measured: Sequence[Measured], tokens_per_second: float, bytes_per_token: int) -> list[BreakEven]:
    """Return the break-even of each tier and size of blocks.

    n blocks are loaded in the time of one block alone, and n - 1 blocks at the best bandwidth. They are computed in the
    time of their tokens at ``tokens_per_second``.

    Args:
        measured: the measurements.
        tokens_per_second: speed of the prefill.
        bytes_per_token: bytes of the KV of one token.
    """
    loads: dict[tuple[str, int], list[Measured]] = {}
    for found in measured:
        if found.direction == "load" and found.blocks:
            loads.setdefault((found.tier, found.block_bytes), []).append(found)
    pays: list[BreakEven] = []
    for (tier, block_bytes), some in loads.items():
        first = min(some, key=lambda found: found.depth).p50
        fastest = max(some, key=lambda found: found.bytes_per_second)
        best = fastest.bytes_per_second
        tokens = block_bytes / bytes_per_token
        gain = tokens / tokens_per_second - block_bytes / best
        needed = first - block_bytes / best
        blocks = None if gain <= 0 else max(1, math.ceil(needed / gain))
        whole = None if blocks is None else math.ceil(blocks * tokens)
        pays.append(BreakEven(tier, block_bytes, first, best, blocks, whole, fastest.runs, fastest.limit))
    return pays


_HEADINGS = ("tier", "direction", "block", "depth", "GB/s", "limit", "p50", "p90", "p99", "CPU s/GB", "failed")


def _cells(found: Measured) -> tuple[str, ...]:
    return (
        found.tier,
        found.direction,
        format_bytes(found.block_bytes),
        str(found.depth),
        f"{found.bytes_per_second / 1e9:.3f}",
        "-" if found.limit is None else f"{found.limit / 1e9:.3f}",
        *("-" if math.isnan(value) else duration(value) for value in (found.p50, found.p90, found.p99)),
        "-" if math.isnan(found.cpu_seconds_per_gb) else f"{found.cpu_seconds_per_gb:.2f}",
        str(found.failed),
    )


def _line(found: Measured) -> str:
    block = format_bytes(found.block_bytes)
    return f"{found.tier}: {found.direction} {block}, {found.depth} at a time: {rate(found.bytes_per_second)}"


def _sentence(found: BreakEven) -> str:
    block = format_bytes(found.block_bytes)
    speed = f"first block {duration(found.first_block)}, then {rate(found.bytes_per_second)}"
    if found.blocks is None:
        runs = "1 run" if found.runs == 1 else f"the best of {found.runs} runs"
        slow = found.limit is not None and found.bytes_per_second < found.limit / 2
        beside = f", where the bare device does {rate(found.limit)}" if slow and found.limit is not None else ""
        return f"{found.tier}, blocks of {block}: no load beat the prefill in {runs} ({speed}{beside}); " + (
            "the machine was busy, or the tier is slow: measure again before you leave the tier out"
            if slow
            else "leave the tier out, if another run agrees"
        )
    return (
        f"{found.tier}, blocks of {block}: a load pays from {found.tokens:,} tokens on ({speed}); "
        f"set min_prefix_blocks: {found.blocks}"
    )


def _print(measured: Sequence[Measured], pays: Sequence[BreakEven]) -> None:
    if not measured:
        return
    console = stdout()
    if console.is_terminal:
        table = Table()
        for number, heading in enumerate(_HEADINGS):
            table.add_column(heading, justify="left" if number < 2 else "right")
        for found in measured:
            table.add_row(*_cells(found))
        console.print(table)
    else:
        click.echo("\t".join(_HEADINGS))
        for found in measured:
            click.echo("\t".join(_cells(found)))
    for pay in pays:
        click.echo(_sentence(pay))
