"""``replay``: a trace of requests through the tiers of a stack, in simulated time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TimeRemainingColumn
from rich.table import Table

from tiering.cli.output import progress
from tiering.cli.parameters import SIZE, Number, device_cache_option
from tiering.config.source import read_plain
from tiering.replay.model import ReplayModel, load_model
from tiering.replay.readers import Trace
from tiering.replay.report import advice, label, table
from tiering.replay.study import Study, run_study
from tiering.replay.sweep import parse_axis, points


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="TRACE...")
@click.option("--stack", "stack_path", required=True, type=click.Path(path_type=Path), help="The stack file.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="WORD=VALUES",
    help="Replay several stacks: primary.capacity=1GiB..1TiB doubles the size at each step, ..1TiB/6 makes 6 steps, "
    "primary.eviction=lru,arc lists values. Several sweeps give all combinations.",
)
@click.option("--model", "model_path", type=click.Path(path_type=Path), help="YAML file with speeds and prices.")
@click.option(
    "--kv-bytes-per-token", type=SIZE, metavar="SIZE", help="KV of one token, all layers and ranks (default: 128KiB)."
)
@click.option(
    "--prefill-speed",
    type=Number(min=0, min_open=True),
    metavar="TOKENS/S",
    help="Prompt tokens computed per second (20000).",
)
@device_cache_option("not modelled")
@click.option(
    "--hints",
    "hinted_sessions",
    type=Number(0, 1),
    metavar="SHARE",
    help="Share of the sessions whose clients hint at their next request and their end; default: 0.",
)
@click.option("--block-tokens", type=click.IntRange(min=1), help="Tokens of one block; default: those of the format.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def replay(
    traces: tuple[Path, ...],
    stack_path: Path,
    sweeps: tuple[str, ...],
    model_path: Path | None,
    kv_bytes_per_token: int | None,
    prefill_speed: float | None,
    device_cache: int | None,
    hinted_sessions: float | None,
    block_tokens: int | None,
    as_json: bool,
) -> None:
    """Replay traces of requests through the tiers of a stack, and say what they would serve.

    The manager, its policies and its indexes are the real ones; time and media are simulated. TRACE is a file in the
    format of Mooncake's or Bailian's public traces, or one of "kv-tiering trace generate". Several files are merged by
    time.

    \b
    Examples:
      kv-tiering replay trace.jsonl --stack stack.yaml
      kv-tiering replay trace.jsonl --stack stack.yaml --sweep primary.capacity=1GiB..1TiB
      kv-tiering replay trace.jsonl --stack stack.yaml --sweep primary.eviction=lru,arc --json
    """
    given = {
        "kv_bytes_per_token": kv_bytes_per_token,
        "prefill_tokens_per_second": prefill_speed,
        "device_cache": device_cache,
        "hinted_sessions": hinted_sessions,
    }
    model = load_model(model_path, {word: value for word, value in given.items() if value is not None})
    trace = Trace(traces, block_tokens)
    variants = points(read_plain(stack_path), [parse_axis(text) for text in sweeps])
    with progress(BarColumn(), TaskProgressColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        study = run_study(trace, variants, model, _block_bytes(trace, model, kv_bytes_per_token), report)
    if as_json:
        click.echo(json.dumps(study.as_dict(), indent=1))
    else:
        _print(study)


def _block_bytes(trace: Trace, model: ReplayModel, given: int | None) -> int:
    """Return the bytes of one block: as given, else as recorded, else by the model."""
    recorded = trace.info.block_bytes
    if recorded is not None and given is None:
        return recorded
    return trace.info.block_tokens * (model.kv_bytes_per_token if given is None else given)


def _print(study: Study) -> None:
    head, rows = table(study)
    shown = Table(*head[: len(study.results[0].settings)], box=None, pad_edge=False, header_style="bold")
    for name in head[len(study.results[0].settings) :]:
        shown.add_column(name, justify="right", no_wrap=True)
    best = study.results.index(study.best) if study.pays else len(rows) - 1
    for number, row in enumerate(rows):
        shown.add_row(*row, style="bold" if number == best else "")
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200)
    console.print(shown)
    speed = sum(result.blocks for result in study.results) / max(sum(r.seconds for r in study.results), 1e-9)
    for line in [*advice(study), f"Replayed {speed:,.0f} blocks a second."]:
        click.echo(line)
    if len(study.results) > 1:
        click.echo(f"The file of {label(study.best)}; fill masked secrets in again:\n\n{study.best.stack}")
