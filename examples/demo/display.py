"""The output: live progress on a terminal, plain lines in a pipe, and a table at the end."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

from examples.demo.report import TIERS, ActResult, Check

MEBI = 1024**2


class Progress(AbstractContextManager["Progress"], Protocol):
    """The progress of an act."""

    def update(self, sign: dict[str, Any]) -> None:
        """Take in one sign of progress of the act's process."""


class Display:
    """Prints the story. On a terminal with rich installed it is coloured and live."""

    def __init__(self, plain: bool = False) -> None:
        self._console: Any = None
        if not plain and sys.stdout.isatty():
            try:
                from rich.console import Console

                self._console = Console(highlight=False)
            except ImportError:
                pass

    def heading(self, text: str) -> None:
        """The title of a part."""
        if self._console is not None:
            self._console.print()
            self._console.rule(f"[bold]{text}", align="left")
        else:
            print(f"\n== {text}", flush=True)

    def say(self, text: str) -> None:
        """One line of the story."""
        if self._console is not None:
            self._console.print(text, markup=False)
        else:
            print(text, flush=True)

    def progress(self, name: str) -> Progress:
        """A progress display for one act."""
        return _LiveProgress(self._console, name) if self._console is not None else _PlainProgress(name)

    def table(self, acts: list[ActResult], first: ActResult) -> None:
        """The acts side by side."""
        header = (
            "",
            "TTFT p50",
            "p95",
            "computed",
            "again",
            *TIERS,
            "GPU→CPU",
            "CPU→GPU",
            "local r/w",
            "s3 r/w",
            "outputs",
        )
        rows = [_row(act, first) for act in acts]
        if self._console is not None:
            from rich.table import Table

            table = Table(
                header_style="bold",
                caption="tokens computed, computed again, and hit per tier; MiB moved",
                caption_justify="left",
            )
            for index, title in enumerate(header):
                table.add_column(title, justify="left" if index in {0, len(header) - 1} else "right", no_wrap=True)
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        for row in (header, *rows):
            print(
                "  ".join(
                    cell.ljust(width) if not column else cell.rjust(width)
                    for column, (cell, width) in enumerate(zip(row, widths, strict=True))
                )
            )
        print("(TTFT in seconds; tokens computed, computed again, and hit per tier; MiB moved)", flush=True)

    def checks(self, checks: list[Check]) -> None:
        """The claims and the results of their checks."""
        for check in checks:
            mark = "ok  " if check.held else "FAIL"
            if self._console is not None:
                colour = "green" if check.held else "bold red"
                self._console.print(f"[{colour}]{mark}[/] [bold]{check.name}[/]: ", end="")
                self._console.print(check.seen, markup=False)
            else:
                print(f"{mark} {check.name}: {check.seen}", flush=True)


def _mebi(act: ActResult, *kinds: str) -> str:
    return "/".join(f"{act.bytes_moved[kind] / MEBI:.0f}" if kind in act.bytes_moved else "-" for kind in kinds)


def _row(act: ActResult, first: ActResult) -> tuple[str, ...]:
    return (
        act.name,
        f"{act.ttft(0.50):.2f}",
        f"{act.ttft(0.95):.2f}",
        f"{act.computed_tokens:,}",
        f"{act.recomputed_tokens:,}",
        *(f"{act.hit_tokens_by_tier[tier]:,}" for tier in TIERS),
        _mebi(act, "gpu_to_cpu"),
        _mebi(act, "cpu_to_gpu"),
        _mebi(act, "local_read", "local_written"),
        _mebi(act, "s3_read", "s3_written"),
        "reference" if act is first else ("identical" if act.agrees_with(first) else "DIFFERENT"),
    )


def _loaded(sign: dict[str, Any]) -> str:
    return f"{sign.get('computed', 0):,} tokens computed, {sign.get('loaded', 0) / MEBI:.0f} MiB loaded"


class _PlainProgress(Progress):
    """A line for every quarter of the answers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said = 0
        self._last: dict[str, Any] = {}

    def update(self, sign: dict[str, Any]) -> None:
        if "computed" in sign:
            self._last = sign
        quarter = 4 * sign.get("done", 0) // max(sign.get("total", 1), 1)
        if quarter > self._said:
            self._said = quarter
            print(f"   {sign['done']:>3} of {sign['total']} answers; {_loaded(self._last)}", flush=True)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        return None


class _LiveProgress(Progress):
    """A bar, what was computed and loaded, and the latest question with its time to the first token."""

    def __init__(self, console: Any, name: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
        )
        self._bar = Bar(*columns, console=console, transient=True)
        self._task = self._bar.add_task(name, total=None, note="starting")
        self._ask = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, sign: dict[str, Any]) -> None:
        phase = sign["phase"]
        if phase == "answer":
            self._bar.console.print(
                f"   {sign['user']:<6} {sign['ttft']:5.2f} s  {sign['question']}",
                style="dim",
                markup=False,
                no_wrap=True,
                overflow="ellipsis",
            )
        if "done" in sign:
            self._bar.update(self._task, completed=sign["done"], total=sign["total"])
        if "computed" in sign:
            self._bar.update(self._task, note=_loaded(sign))
        elif phase == "settle":
            self._bar.update(self._task, note="waiting until the tiers have stored everything")
