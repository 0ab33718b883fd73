"""An engine that forks a misbehaving child, and is killed afterwards."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from tests.tiers.local.rig import LocalRig
from tiering import ModelIdentity, load_stack, make_offload_key, open_manager
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.primary.memory.region import SharedRegion
from tiering.testing.keys import key_of

BEFORE = range(100)
AFTER = range(100, 300)
CTX = ReqContext("r")


def keys(numbers: range) -> list[bytes]:
    return [key_of(number) for number in numbers]


def store_all(rig: LocalRig, numbers: range) -> None:
    for start in range(numbers.start, numbers.stop, 32):
        part = keys(range(start, min(start + 32, numbers.stop)))
        if rig.store(part) != part:
            raise RuntimeError("blocks were not stored")


def fork(action: Callable[[], object]) -> int:
    """Return the exit code of a forked child that calls ``action`` and then ends like any process."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        signal.alarm(20)
        action()
        gc.collect()
        atexit._run_exitfuncs()
        code = 0
    except BaseException as error:
        sys.__stderr__ and sys.__stderr__.write(f"the child failed: {error!r}\n")
    finally:
        os._exit(code)


def misbehave(rig: LocalRig, how: str) -> None:
    """Use the parent's tier from a child, which must have no effect."""
    tier = rig.tier
    if how == "shutdown":
        tier.shutdown(rig.context.clock() + 5)
    elif how == "checkpoint":
        tier.checkpoints.request()
        for _ in range(50):
            tier.on_schedule_end()
            tier.io.wait(0.01)
            list(tier.get_finished())
    elif how == "store":
        rig.submit_store(keys(range(1000, 1032)))
        tier.io.drain(rig.context.clock() + 1)
        list(tier.get_finished())
        tier.on_schedule_end()
    elif how == "reset":
        tier.reset(rig.context.clock() + 5)


def run(path: str, how: str, pipe: Connection) -> None:
    """Store, fork a child that misbehaves, store more, and die.

    Sends the exit code of the child, and ("stored",) at the end.
    """
    rig = LocalRig(Path(path), checkpoint_interval="1h", capacity="8MiB").open()
    store_all(rig, BEFORE[:50])
    rig.checkpoint()
    store_all(rig, BEFORE[50:])
    pipe.send(fork(lambda: misbehave(rig, how)))
    store_all(rig, AFTER)
    pipe.send("stored")
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------- the manager


def use_manager(manager: TieringOffloadingManager | CPUPrimaryTierOffloadingManager) -> None:
    """Call every method of a manager in a child.

    Raises:
        AssertionError: a method had an effect.
    """
    key = keys(range(1))
    manager.on_new_request(CTX)
    assert manager.lookup(key[0], CTX) is False
    assert manager.match_prefix(key, CTX).hits == 0
    assert manager.prepare_store(key, CTX) is None
    manager.complete_store(key, CTX)
    try:
        manager.prepare_load(key, CTX)
    except KeyError:
        pass
    else:
        raise AssertionError("a block was readable")
    manager.complete_load(key, CTX)
    manager.touch(key, CTX)
    manager.count_sources(key, CTX)
    manager.on_request_finished(CTX)
    manager.on_schedule_end()
    assert not manager.has_pending_work()
    assert not list(manager.take_events())
    assert manager.reset_cache() is False
    manager.get_stats()
    manager.shutdown()


def run_manager(path: str, region: str, pipe: Connection) -> None:
    """Use a manager with rows in /dev/shm, before its worker is there, in a child and then in the parent.

    Sends the results of both.
    """
    stack = load_stack(
        {
            "primary": {"capacity": 32 * 8192},
            "secondary": [{"type": "local", "path": path, "capacity": "8MiB", "required": True}],
        }
    )
    rows = SharedRegion.open_shared(region, 32, 8192, sides=2)
    model = ModelIdentity(name="m", weights="w", dtype="bfloat16", layout="fork")
    manager = open_manager(stack, 8192, model, region=rows)
    manager.on_new_request(CTX)
    stored = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(8)]

    def steps(until: Callable[[], object]) -> None:
        while not until():
            manager.on_schedule_end()

    def fill(chosen: list[bytes]) -> None:
        output = manager.prepare_store(chosen, CTX)
        if output is None:
            raise RuntimeError("no room")
        manager.complete_store(chosen, CTX)
        steps(lambda: not manager.has_pending_work())

    rows.array[:] = 7
    before = rows.array.copy()

    def use_all() -> None:
        use_manager(manager)
        use_manager(manager.primary_tier)
        rows.close()

    pipe.send(fork(use_all))
    pipe.send((rows.array == before).all())
    late = SharedRegion.open_shared(region, 32, 8192, sides=2)
    pipe.send(rows.is_complete)
    fill(stored)
    pipe.send(manager.match_prefix(stored, CTX).hits)
    late.close()
    manager.shutdown()
