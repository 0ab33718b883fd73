"""Faults of either side of the machine's service, and of its disk, never give an engine wrong bytes."""

from __future__ import annotations

import os
import random
import resource
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.machine.engines import PATIENCE, StormProcess
from tests.machine.hosts import ServiceProcess, service_process
from tiering.machine.options import PEERS_TIER
from tiering.testing.clock import until

TURNS = 100
"""A fault comes, and the end of a stop, after fewer turns of the storms; the end comes after as many."""

FAULTS = ("kill", "end", "engine", "stop service", "stop engine", "scribble", "full disk", "no socket")

ROUNDS = int(os.environ.get("KV_MACHINE_ROUNDS", str(len(FAULTS))))
SEED = int(os.environ.get("KV_MACHINE_SEED", "0"))


def go_on(storms: Sequence[StormProcess], turns: int) -> None:
    """Wait until the storms have taken further turns together."""

    def taken() -> int:
        for storm in storms:
            storm.drain()
        return sum(storm.turns.value for storm in storms)

    before = taken()
    assert until(lambda: taken() >= before + turns, PATIENCE)


def faults(rng: random.Random) -> Iterator[str]:
    """Yield faults without end, each of them once before any comes again."""
    while True:
        yield from rng.sample(FAULTS, len(FAULTS))


def scribble(rng: random.Random, directory: Path) -> None:
    """Write random bytes into the files of a disk, at any place."""
    for path in sorted(each for each in directory.rglob("*") if each.is_file()):
        with path.open("r+b") as file:
            for _ in range(8):
                file.seek(rng.randrange(max(1, path.stat().st_size)))
                file.write(rng.randbytes(64))


def stop_for(pid: int | None, storms: Sequence[StormProcess], turns: int) -> None:
    """Stop a process, and resume it after some turns of the storms."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    go_on(storms, turns)
    os.kill(pid, signal.SIGCONT)


def disturb(what: str, rng: random.Random, service: ServiceProcess, storms: Sequence[StormProcess]) -> None:
    """Do to the service, its disk or the first engine what a fault is called."""
    if what in ("kill", "end"):
        getattr(service, what)()
        service.restart()
    elif what == "stop service":
        stop_for(service.process.pid, storms, rng.randrange(TURNS // 20))  # each load waits until its deadline
    elif what == "stop engine":
        stop_for(storms[0].process.pid, storms, rng.randrange(TURNS))
    elif what == "scribble":
        scribble(rng, service.socket.parent / "disk")
    elif what == "full disk":
        soft, hard = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (0, hard))  # no write has room
        go_on(storms, rng.randrange(TURNS))
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
    elif what == "no socket":
        service.socket.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [("local",), (PEERS_TIER, "local")])
def test_faults_of_either_side_never_give_wrong_bytes(tmp_path: Path, tiers: Sequence[str]) -> None:
    seed = SEED
    rng = random.Random(f"{seed} {ROUNDS}")
    done: Counter[str] = Counter()
    tier = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "4MiB"}
    wrong: list[int] = []
    promoted = 0
    with service_process(tmp_path, tier) as service:
        storms = [StormProcess(service.socket, seed * 1000 + number, tiers) for number in range(2)]
        for turn, what in zip(range(ROUNDS), faults(rng), strict=False):
            go_on(storms, rng.randrange(TURNS))
            done[what] += 1
            if what == "engine":
                victim = storms.pop(0)
                victim.process.kill()
                victim.process.join()
                victim.drain()
                wrong += victim.wrong
                promoted += victim.promoted
                storms.append(StormProcess(service.socket, 100_000 * seed + turn + 10, tiers))
            else:
                disturb(what, rng, service, storms)
        go_on(storms, TURNS)
        for storm in storms:
            storm.end()
            wrong += storm.wrong
            promoted += storm.promoted
        assert service.process.poll() is None, service.log
        assert service.end() == 0
    print(f"{dict(done)}, {promoted} blocks came from the service")
    assert wrong == []
    assert promoted > 0 or tiers[0] == PEERS_TIER  # a round may end before rows are shown
