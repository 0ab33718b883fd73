"""The life of Mooncake's client: no call outlives it, and no transfer outlives its call."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.mooncake_pool import Master, Owner
from tests.tiers.mooncake.fake_native import FakeNative
from tiering.errors import ConfigError, PermanentStoreError, TemporaryStoreError
from tiering.testing.clock import FakeClock, until
from tiering.testing.frames import block_to_get
from tiers.mooncake import MooncakeOptions
from tiers.mooncake.client import HEADER_BYTES, PAGE_HEADERS, PoolClient, load
from tiers.mooncake.tier import LATE_SECONDS, MooncakeStore

BLOCK = 4096
OPTIONS = MooncakeOptions(master="127.0.0.1:1", host="127.0.0.1")


class Rig:
    """A store on fake native clients, with a clock that a test moves."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.natives: list[FakeNative] = []
        self.clock = FakeClock()
        self.client = PoolClient(OPTIONS, memoryview(bytearray(10 * BLOCK)), self._make)
        self.store = MooncakeStore(OPTIONS, self.client, self.clock)

    def _make(self) -> FakeNative:
        self.natives.append(FakeNative(self.told))
        return self.natives[-1]

    def get(self) -> object:
        (outcome,) = self.store.get([block_to_get(self.store, "a", BLOCK)])
        return outcome


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.store.open()
    return rig


def test_rows_are_registered_once_before_the_first_call(rig: Rig) -> None:
    rig.get()
    rig.get()
    assert rig.told == ["setup", f"register {10 * BLOCK}", f"register {PAGE_HEADERS * HEADER_BYTES}", "get", "get"]


def test_a_get_that_fails_late_ends_the_client_before_it_returns_and_the_next_call_connects_again(rig: Rig) -> None:
    def slow(names: Sequence[str]) -> list[int]:
        rig.clock.advance(LATE_SECONDS)
        return [-800] * len(names)

    rig.natives[0].get_codes = slow
    assert isinstance(rig.get(), TemporaryStoreError)
    assert rig.told[-1] == "close", "nothing may write to the row once the outcome is known"
    rig.get()
    assert len(rig.natives) == 2
    assert rig.told[-1] == "get"


def test_a_get_that_fails_early_keeps_the_client(rig: Rig) -> None:
    rig.natives[0].get_codes = lambda names: [-800] * len(names)
    assert isinstance(rig.get(), TemporaryStoreError)
    assert "close" not in rig.told


def test_a_client_ends_only_when_no_call_is_under_way(rig: Rig) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hang(names: Sequence[str]) -> list[int]:
        inside.set()
        assert go_on.wait(20)
        return [-704] * len(names)

    rig.natives[0].get_codes = hang
    with ThreadPoolExecutor(2) as threads:
        getting = threads.submit(rig.get)
        assert inside.wait(20)
        closing = threads.submit(rig.store.close)
        until(lambda: rig.store.probe(["a"]).held == (None,))  # the other thread has begun to close
        assert not rig.natives[0].ended.is_set()
        go_on.set()
        getting.result(20)
        closing.result(20)
    assert rig.told[-2:] == ["get", "close"]


def test_a_closed_store_gives_typed_errors_and_can_be_opened_again(rig: Rig) -> None:
    rig.store.close()
    rig.store.close()
    assert isinstance(rig.get(), PermanentStoreError)
    assert rig.store.probe(["a"]).held == (None,)
    rig.store.open()
    assert rig.store.probe(["a"]).held == (False,)


def test_a_setup_that_fails_is_temporary_and_rows_that_cannot_be_registered_are_not(rig: Rig) -> None:
    for word, kind in (("setup_code", TemporaryStoreError), ("register_code", PermanentStoreError)):
        fresh = Rig()
        native = FakeNative(fresh.told)
        setattr(native, word, -1)
        fresh.client = PoolClient(OPTIONS, memoryview(bytearray(BLOCK)), lambda native=native: native)  # type: ignore[misc]
        with pytest.raises(kind):
            fresh.client.open()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="extra mooncake"):
        load(OPTIONS)


EXIT = """
import os, signal, sys, threading
from tiers.mooncake import MooncakeOptions
from tiers.mooncake.client import PoolClient
client = PoolClient(MooncakeOptions(master=sys.argv[1], segment_size=16 << 20), memoryview(bytearray(4096)))
client.open()
inside = threading.Event()
def ask():
    with client.use() as connection:
        inside.set()
        connection.native.batch_is_exist(["a"])
if sys.argv[2] != "0":
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    threading.Thread(target=ask, daemon=True).start()
    inside.wait()
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_ends_in_order_also_while_a_call_hangs(own_pool: tuple[Master, Owner], hangs: bool) -> None:
    master, _ = own_pool
    pid = master.process.pid if hangs else 0
    try:
        done = subprocess.run([sys.executable, "-c", EXIT, master.address, str(pid)], check=False, timeout=60)
    finally:
        master.process.send_signal(signal.SIGCONT)
    assert done.returncode == 0
