"""``trace``: traces of requests for replays."""

from __future__ import annotations

import difflib
import math
from typing import TextIO

import click

from tiering.cli.parameters import Number
from tiering.errors import ConfigError
from tiering.replay.generate import WORKLOADS, generate
from tiering.replay.readers import own_lines


@click.group(invoke_without_command=True)
@click.pass_context
def trace(context: click.Context) -> None:
    """Make traces of requests for replays.

    \b
    Example:
      kv-tiering trace generate --kind chat=3 --kind agents=1 -o trace.jsonl
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@trace.command("generate")
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    metavar="KIND[=SHARE]",
    help=f"Kind of session and its share of all sessions; repeatable. Kinds: {', '.join(WORKLOADS)}. Default: all, "
    "in equal shares.",
)
@click.option("--requests", type=click.IntRange(min=1), default=10_000, show_default=True, help="Number of requests.")
@click.option("--rate", type=Number(min=1e-6), default=2.0, show_default=True, help="Requests per second.")
@click.option("--block-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Tokens of one block.")
@click.option("--seed", type=int, default=0, show_default=True, help="Equal seeds give equal traces.")
@click.option("-o", "--output", type=click.File("w", lazy=True), default="-", help="File to write; default: stdout.")
def generate_trace(
    kinds: tuple[str, ...], requests: int, rate: float, block_tokens: int, seed: int, output: TextIO
) -> None:
    """Generate a trace: chat in several turns, shared system prompts, long documents, agents.

    \b
    Example:
      kv-tiering trace generate --kind chat=3 --kind agents=1 --requests 50000 -o trace.jsonl
      kv-tiering replay trace.jsonl --stack stack.yaml
    """
    shares = dict(map(_kind, kinds)) or dict.fromkeys(WORKLOADS, 1.0)
    lines = own_lines(generate(shares, requests, rate, block_tokens, seed), block_tokens)
    output.writelines(line + "\n" for line in lines)


def _kind(text: str) -> tuple[str, float]:
    name, equals, share = text.partition("=")
    try:
        number = float(share) if equals else 1.0
    except ValueError:
        raise ConfigError(f"--kind {text}: {share!r} is not a number; write it like chat=3") from None
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--kind {text}: {name!r} is not a kind of session{hint}; allowed are {', '.join(WORKLOADS)}")
    if not 0 < number < math.inf:
        raise ConfigError(f"--kind {text}: the share must be above 0; to leave a kind out, name the others")
    return name, number
