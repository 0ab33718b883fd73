"""The harness of all benchmarks: variants side by side, in turns, by medians.

Results are a table, Markdown and JSON. A benchmark is a module ``benchmarks/bench_<subject>.py`` with ``def run(bench:
Bench) -> None``; its docstring says which quantity is measured, and beside what. Machines are noisy: absolute numbers
say little, ratios within one run and CPU seconds a lot. So :meth:`Bench.compare` runs the variants in turn, round by
round (the order rotates), and :func:`ratio` is the median over the rounds of the ratio within a round::

    def run(bench: Bench) -> None:
        stats = bench.compare("store, 2 MiB blocks", {
            "tier": lambda: timed(store_with_tier, nbytes=total),
            "one file per block": lambda: timed(store_files, nbytes=total),
        }, unit="GB/s")
        gain = ratio(stats["tier"], stats["one file per block"])
        bench.target("store against one file per block", gain, 1.4, "min", "x")
        bench.target("CPU of a store", stats["tier"].cpu, 0.22, "max", "s/GB")
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

from tiering.secondary.contract import SecondaryTierManager

Direction = Literal["min", "max"]
"""``max``: the measured value may be at most the limit; ``min``: at least."""

Cell = str | int | float

REPEATS = 7
TOLERANCE = 0.03
"""Distance by which the far end of a target's interval may miss the limit, in the target's unit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one variant: the compared quantity, its CPU cost, and other quantities worth a median.

    ``cpu`` is in CPU seconds (per GB if the run moved bytes), over this process and its children that have ended.
    """

    value: float
    cpu: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stats:
    """All runs of one variant: ``samples`` in the order of rounds, and their medians."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]
    cpu: float | None
    extra: dict[str, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over paired rounds, and its 95% interval."""

    middle: float
    low: float
    high: float


def spread(values: Sequence[float], resamples: int = 2000, *, group: int = 1) -> Spread:
    """Return the median of ``values``, one per round, with the interval that a bootstrap finds for it.

    The bootstrap draws with a fixed seed, so the same values have the same interval.

    Args:
        values: the values, by round.
        resamples: number of draws.
        group: rounds that are drawn together, because the same processes ran them: two processes that do the same work
            may differ by several percent as long as they live.
    """
    dice = random.Random(0)
    groups = [values[start : start + group] for start in range(0, len(values), group)]
    medians = sorted(
        statistics.median([value for drawn in dice.choices(groups, k=len(groups)) for value in drawn])
        for _ in range(resamples)
    )
    return Spread(statistics.median(values), medians[resamples // 40], medians[-1 - resamples // 40])


@dataclass(frozen=True, slots=True)
class Target:
    """A limit that a benchmark must reach, and the value that it reached."""

    name: str
    value: float
    limit: float
    direction: Direction
    unit: str
    spread: Spread | None = None
    """The interval around an estimated ``value``.

    Its far end may miss the limit by :data:`TOLERANCE`.
    """

    @property
    def ok(self) -> bool:
        """True if the target was reached."""
        if self.direction == "min":
            return self.value >= self.limit and (self.spread is None or self.spread.low >= self.limit - TOLERANCE)
        return self.value <= self.limit and (self.spread is None or self.spread.high <= self.limit + TOLERANCE)

    @property
    def measured(self) -> str:
        """The value for people, with its interval."""
        shown = f"{show(self.value)} {self.unit}".rstrip()
        return shown if self.spread is None else f"{shown} ({show(self.spread.low)} to {show(self.spread.high)})"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows to show, in the report and in the results file."""

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def cpu_seconds() -> float:
    """User and system CPU seconds of this process (all threads) and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def timed(work: Callable[[], object], *, nbytes: int | None = None, per: int = 1) -> Sample:
    """Run ``work`` once, and return its wall time and CPU time.

    With ``nbytes``, the sample has GB/s and CPU s/GB (1e9 bytes); otherwise wall and CPU seconds, divided by ``per``.
    The garbage collector runs before the measurement.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        cpu, start = cpu_seconds(), time.perf_counter()
        work()
        wall, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    finally:
        if enabled:
            gc.enable()
    if nbytes is not None:
        return Sample(nbytes / 1e9 / wall, cpu / (nbytes / 1e9))
    return Sample(wall / per, cpu / per)


def ratio(numerator: Stats, denominator: Stats) -> float:
    """Return the median over the rounds of one variant's value divided by the other's."""
    return statistics.median(a / b for a, b in zip(numerator.samples, denominator.samples, strict=True))


def _summary(samples: Sequence[Sample]) -> Stats:
    values = tuple(sample.value for sample in samples)
    cpus = [sample.cpu for sample in samples if sample.cpu is not None]
    extra: dict[str, float] = {}
    for word in samples[0].extra:
        extra[word] = statistics.median(sample.extra[word] for sample in samples)
    return Stats(
        statistics.median(values), min(values), max(values), values, statistics.median(cpus) if cpus else None, extra
    )


def show(value: Cell) -> str:
    """Format a number for people: three significant digits, thousands separated."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2e}"


class Bench:
    """The argument of a benchmark's ``run``.

    ``quick`` asks for a smoke run with small sizes; its numbers mean little and are not written to the results file.
    ``directory`` is an empty directory on a real disk, which is removed afterwards. ``rounds`` is the number of rounds
    that count; None leaves it to the benchmark. ``against`` is another checkout of the project, whose code is to be
    measured beside this one; most benchmarks cannot do that. ``engines`` are words for the engines to measure, and
    ``starts`` is the number of their starts, for the benchmarks that have ``CHOICES``.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        quick: bool = False,
        out: TextIO | None = None,
        rounds: int | None = None,
        against: Path | None = None,
        engines: Sequence[str] = (),
        starts: int | None = None,
    ) -> None:
        self.name = name
        self.directory = directory
        self.quick = quick
        self.rounds = rounds
        self.against = against
        self.engines = engines
        self.starts = starts
        self.tables: list[Table] = []
        self.targets: list[Target] = []
        self.notes: list[str] = []
        self.results: dict[str, dict[str, Stats]] = {}
        self._out = out or sys.stdout

    def compare(
        self,
        name: str,
        variants: Mapping[str, Callable[[], float | Sample]],
        repeats: int = REPEATS,
        *,
        unit: str = "",
        warmup: int = 1,
    ) -> dict[str, Stats]:
        """Run all variants ``repeats`` times in turn, and return their statistics; add a table.

        A variant returns the quantity to compare, in ``unit``. ``warmup`` rounds run first and do not count. A quick
        run does one round and no warm-up.
        """
        rounds, skipped = (1, 0) if self.quick else (max(self.rounds or repeats, 1), warmup)
        names = list(variants)
        samples: dict[str, list[Sample]] = {variant: [] for variant in names}
        for number in range(skipped + rounds):
            self._progress(f"{self.name}: {name}: round {number + 1} of {skipped + rounds}")
            first = number % len(names)
            for variant in names[first:] + names[:first]:
                sample = variants[variant]()
                if number >= skipped:
                    samples[variant].append(sample if isinstance(sample, Sample) else Sample(float(sample)))
        self._progress("")
        stats = {variant: _summary(runs) for variant, runs in samples.items()}
        self.results[name] = stats
        self._add_comparison(name, stats, unit, rounds)
        return stats

    def target(
        self, name: str, value: float | Spread | None, limit: float, direction: Direction = "max", unit: str = ""
    ) -> None:
        """Declare a target: ``value`` must be at most (``max``) or at least (``min``) ``limit``.

        Of a :class:`Spread`, the middle must reach the limit, and the far end miss it by :data:`TOLERANCE` at most.
        """
        around = value if isinstance(value, Spread) else None
        middle = value.middle if isinstance(value, Spread) else float("nan") if value is None else value
        self.targets.append(Target(name, middle, limit, direction, unit, around))

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Show a table, on the terminal now and in the results file."""
        table = Table(title, tuple(headers), tuple(tuple(show(cell) for cell in row) for row in rows))
        self.tables.append(table)
        print(render(table), file=self._out, flush=True)

    def note(self, text: str) -> None:
        """Add a sentence to the results: a part that was left out, or an explanation."""
        self.notes.append(text)
        print(text, file=self._out, flush=True)

    def _add_comparison(self, name: str, stats: Mapping[str, Stats], unit: str, rounds: int) -> None:
        words = list(next(iter(stats.values())).extra)
        has_cpu = any(stat.cpu is not None for stat in stats.values())
        base = next(iter(stats))
        headers = ["variant", f"median {unit}".strip(), "lowest", "highest", f"ratio to {base}"]
        headers += ["CPU s/GB" if unit == "GB/s" else "CPU s"] * has_cpu + words
        rows: list[list[Cell]] = []
        for variant, stat in stats.items():
            row: list[Cell] = [variant, stat.median, stat.low, stat.high, ratio(stat, stats[base])]
            if has_cpu:
                row.append("" if stat.cpu is None else stat.cpu)
            rows.append(row + [stat.extra.get(word, "") for word in words])
        self.table(f"{name} ({rounds} alternating round{'s' * (rounds > 1)})", headers, rows)

    def _progress(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def open_tier(tier: SecondaryTierManager, seconds: float) -> None:
    """Open a tier within ``seconds``.

    Raises:
        RuntimeError: it did not open; the text has the tier's reason.
    """
    if not tier.open(time.monotonic() + seconds):
        reason = f"no answer within {seconds:g} s" if tier.open_error is None else tier.open_error
        raise RuntimeError(f"the tier {tier.name} did not open: {reason}")


def render(table: Table) -> str:
    """Return a table as Markdown; aligned columns make it readable on a terminal too."""
    grid = [table.headers, *table.rows]
    widths = [max(3, *(len(row[column]) for row in grid)) for column in range(len(table.headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in grid
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return f"\n**{table.title}**\n\n" + "\n".join(lines)


def render_targets(targets: Sequence[Target], *, judged: bool = True) -> str:
    """Return the table of targets; those of a quick run are not ``judged``."""
    rows = [
        (
            target.name,
            f"{'at most' if target.direction == 'max' else 'at least'} {show(target.limit)} {target.unit}".rstrip(),
            target.measured,
            ("ok" if target.ok else "MISSED") if judged else "not judged",
        )
        for target in targets
    ]
    return render(Table("Targets", ("target", "limit", "measured", ""), tuple(rows)))


# ---------------------------------------------------------------------------------------------------------- the machine


@dataclass(frozen=True, slots=True)
class Machine:
    """The shape of the machine, without which a number means nothing."""

    cpu: str
    cores: int
    memory_gib: float
    filesystem: str
    kernel: str
    python: str
    accelerator: str

    def __str__(self) -> str:
        parts = [
            f"{self.cores} cores ({self.cpu})",
            f"{self.memory_gib:.0f} GiB",
            self.filesystem,
            f"Linux {self.kernel}",
        ]
        parts += [f"Python {self.python}"] + [self.accelerator] * bool(self.accelerator)
        return ", ".join(parts)


def machine(directory: Path) -> Machine:
    """Return the shape of this machine, and the file system of ``directory``."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    accelerator = ""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        accelerator = torch.cuda.get_device_name(0)
    return Machine(
        cpu,
        len(os.sched_getaffinity(0)),
        memory,
        _filesystem(directory),
        platform.release(),
        platform.python_version(),
        accelerator,
    )


def _filesystem(directory: Path) -> str:
    path, found = directory.resolve(), ("?", "?", "")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind, *_ = line.split()
        if path.is_relative_to(mount) and len(mount) >= len(found[2]):
            found = (device, kind, mount)
    return f"{found[1]} on {found[0]}"


# ---------------------------------------------------------------------------------------------------------- the results


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    partial = path.with_suffix(path.suffix + ".partial")
    yield partial
    partial.replace(path)


def write_json(bench: Bench, machine_: Machine, path: Path) -> None:
    """Write all measurements as JSON."""
    data = {
        "benchmark": bench.name,
        "quick": bench.quick,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(machine_),
        "results": {
            name: {variant: asdict(stat) for variant, stat in stats.items()} for name, stats in bench.results.items()
        },
        "tables": [asdict(table) for table in bench.tables],
        "targets": [asdict(target) | {"ok": target.ok} for target in bench.targets],
        "notes": bench.notes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replaced(path) as partial:
        partial.write_text(json.dumps(data, indent=1) + "\n")


def write_section(path: Path, bench: Bench, machine_: Machine, description: str) -> None:
    """Rewrite this benchmark's section of the results file in place, or append it."""
    begin, end = f"<!-- begin {bench.name} -->", f"<!-- end {bench.name} -->"
    parts = [f"## {bench.name}", description.strip(), f"{datetime.now(UTC):%Y-%m-%d}; {machine_}."]
    if bench.targets:
        parts.append(render_targets(bench.targets).strip())
    parts += [render(table).strip() for table in bench.tables] + bench.notes
    section = begin + "\n" + "\n\n".join(parts) + "\n" + end
    text = path.read_text() if path.exists() else "# Results\n"
    if begin not in text:
        text = "\n".join((text.rstrip(), "", begin, end, ""))
    before, _, rest = text.partition(begin)
    with _replaced(path) as partial:
        partial.write_text(before + section + rest.partition(end)[2])
