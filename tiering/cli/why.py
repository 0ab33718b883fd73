"""``why``: the causes of the misses of one request, or of the last hour, from a running engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from tiering.api.masking import shown_name
from tiering.cli.output import duration
from tiering.explain.causes import REASONS, REMEDIES, SENTENCES, MissCause, Reason
from tiering.explain.last_hour import MINUTES
from tiering.explain.past_blocks import TIME_UNIT
from tiering.explain.service import ask, runtime_directory, sockets


@click.command()
@click.argument("request", required=False)
@click.option("--top", is_flag=True, help="Show the most expensive causes of the last hour instead.")
@click.option("--minutes", type=click.IntRange(1, MINUTES), help="Time that --top sums, in minutes.  [default: 60]")
@click.option(
    "--socket",
    "path",
    type=click.Path(path_type=Path),
    help="Socket of the engine; the engine's log names it.  [default: the only one in the runtime directory]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def why(request: str | None, top: bool, minutes: int | None, path: Path | None, as_json: bool) -> int:
    """Show why an engine computed the prompt tokens of a request.

    REQUEST is the id of one of the last requests, as the client got it. The answer about an unknown one names the
    latest ids, and that about a request with several prompts or choices the others. The engine's stack needs the word
    explain, and the command runs on the engine's machine, as the engine's user. No answer has tokens.

    \b
    Examples:
      kv-tiering why chatcmpl-1234
      kv-tiering why --top
      kv-tiering why --top --minutes 5
      kv-tiering why chatcmpl-1234 --socket /run/user/1000/kv-tiering/why-4711-1.sock
    """
    if (request is None) != top:
        raise click.UsageError("give the id of a request, or --top")
    if minutes is not None and not top:
        raise click.UsageError("--minutes belongs to --top")
    question = {"top": True, "minutes": minutes or MINUTES} if top else {"request": request}
    answer = ask(_only_socket() if path is None else path, question)
    if as_json:
        click.echo(json.dumps(answer))
    elif "error" in answer:
        click.echo(answer["error"], err=True)
    else:
        for line in _top_lines(answer) if top else _lines(answer):
            click.echo(line)
    return 1 if "error" in answer else 0


def _only_socket() -> Path:
    """Return the socket of the only engine of this user that explains misses.

    Raises:
        UsageError: there is none, or there are several.
    """
    found = sockets()
    if len(found) == 1:
        return found[0]
    if found:
        raise click.UsageError(
            f"several engines explain misses; choose one with --socket: {', '.join(map(str, found))}"
        )
    raise click.UsageError(
        f"no engine of this user explains misses (no socket in {runtime_directory()}): set explain: {{}} in its stack, "
        "or give the socket that its log names with --socket"
    )


def _lines(answer: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of an explanation for people."""
    prompt, computed = answer["prompt_tokens"], answer["computed_tokens"]
    yield f"{answer['request']}: {prompt} prompt tokens, {prompt - computed} from caches, {computed} computed"
    for span in answer["causes"]:
        yield f"  tokens {span['first']} to {span['end'] - 1} ({span['end'] - span['first']}): {_words(span)}"
        yield from _remedies(span, "    ")
    yield from _notes(answer, "  ")
    if "others" in answer:
        yield f"  (the same id has other prompts or choices: {', '.join(map(shown_name, answer['others']))})"


def _words(span: dict[str, Any]) -> str:
    """Return the sentence about tokens with one cause."""
    text = _cause(span)
    if "token" in span:
        text += f"; the first token that differs is {span['token']}"
    if "ages" in span:
        newest, oldest = (duration(age) if age else f"under {TIME_UNIT:g} s" for age in span["ages"])
        text += f", {oldest} ago" if newest == oldest else f", {newest} to {oldest} ago"
    if "factor" in span:
        text += f"; {_multiple(span['factor'])} times the capacity or less would have kept them"
    if "factors" in span:
        half, most = map(_multiple, span["factors"])
        text += f"; {half} times the capacity or less would have kept half of them, {most} times nine tenths"
    return text


def _multiple(factor: float) -> str:
    """Return a multiple of a capacity, rounded up to a whole number from 10 on."""
    return f"{factor:g}" if factor < 10.0 else str(math.ceil(factor))


def _cause(span: dict[str, Any]) -> str:
    """Return the name of a cause, its tier, its sentence and its reason."""
    word, tier = span["cause"], span.get("tier", "")
    text = f"{word} {tier}".rstrip() + f": {SENTENCES[MissCause[word.upper()]].format(tier=tier)}"
    return f"{text} ({REASONS[Reason[span['reason'].upper()]]})" if "reason" in span else text


def _remedies(span: dict[str, Any], indent: str) -> Iterator[str]:
    """Yield what can be done about a cause, if anything can."""
    tier, word = span.get("tier", ""), span.get("reason", span["cause"])
    remedy = REMEDIES.get(f"{word} {tier}") or REMEDIES.get(word)
    if remedy:
        yield f"{indent}to do: {remedy.format(tier=tier)}"


def _top_lines(answer: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the most expensive causes for people."""
    causes = answer["causes"]
    total = sum(one["tokens"] for one in causes)
    minutes = answer.get("minutes", MINUTES)  # engines of older versions sum an hour, and count no prompt tokens
    when = "hour" if minutes == MINUTES else duration(60.0 * minutes)
    share = f"{total} of {answer['prompt_tokens']}" if "prompt_tokens" in answer else f"{total}"
    yield f"{share} prompt tokens computed in the last {when}"
    for one in causes:
        yield f"{one['tokens']:>12}  {100 * one['tokens'] / total:5.1f}%  {_words(one)}"
        yield from _remedies(one, " " * 22)
    yield from _notes(answer, "")


def _notes(answer: dict[str, Any], indent: str) -> Iterator[str]:
    """Yield what limits an answer: blocks of other namespaces, and the time that is known."""
    if any(one["cause"] == MissCause.NEW.word for one in answer["causes"]):
        for tier, differs in answer.get("cold_starts", {}).items():
            yield f"{indent}({tier} began empty beside blocks that differ in {differs})"
    seconds = duration(answer["followed_seconds"])
    yield f"{indent}(nothing is known from before the last {seconds}: the engine's start, a reset or a new epoch)"
