"""Either side is killed, stopped and resumed at any moment, and no engine gets wrong bytes."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.machine.engines import PATIENCE, StormProcess
from tests.machine.hosts import service_process
from tiering.machine.options import PEERS_TIER
from tiering.testing.clock import until

TURNS = 100
"""A kill, and the end of a stop, come after fewer turns of the storms; the end comes after as many."""

ROUNDS = int(os.environ.get("KV_MACHINE_ROUNDS", "6"))
SEED = int(os.environ.get("KV_MACHINE_SEED", "0"))


def go_on(storms: Sequence[StormProcess], turns: int) -> None:
    """Wait until the storms have taken further turns together."""

    def taken() -> int:
        for storm in storms:
            storm.drain()
        return sum(storm.turns.value for storm in storms)

    before = taken()
    assert until(lambda: taken() >= before + turns, PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [("local",), (PEERS_TIER, "local")])
def test_kills_and_stops_of_either_side_never_give_wrong_bytes(tmp_path: Path, tiers: Sequence[str]) -> None:
    seed = SEED
    rng = random.Random(f"{seed} {ROUNDS}")
    done: Counter[str] = Counter()
    tier = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "4MiB"}
    wrong: list[int] = []
    promoted = 0
    with service_process(tmp_path, tier) as service:
        storms = [StormProcess(service.socket, seed * 1000 + number, tiers) for number in range(2)]
        for turn in range(ROUNDS):
            go_on(storms, rng.randrange(TURNS))
            what = rng.choice(("service", "engine", "stop service", "stop engine"))
            done[what] += 1
            if what == "service":
                service.kill()
                service.restart()
            elif what == "engine":
                victim = storms.pop(0)
                victim.process.kill()
                victim.process.join()
                victim.drain()
                wrong += victim.wrong
                promoted += victim.promoted
                storms.append(StormProcess(service.socket, 100_000 * seed + turn + 10, tiers))
            else:
                pid = service.process.pid if what == "stop service" else storms[0].process.pid
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                # A service that is stopped keeps each load waiting until its deadline.
                go_on(storms, rng.randrange(TURNS // 20 if what == "stop service" else TURNS))
                os.kill(pid, signal.SIGCONT)
        go_on(storms, TURNS)
        for storm in storms:
            storm.end()
            wrong += storm.wrong
            promoted += storm.promoted
        assert service.process.poll() is None, service.log
        assert service.end() == 0
    print(f"{dict(done)}, {promoted} blocks came from the service")
    assert wrong == []
    assert promoted > 0 or (tiers[0] == PEERS_TIER and done["service"])  # a round may end before rows are shown
