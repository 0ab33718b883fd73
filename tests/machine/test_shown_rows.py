"""Engines show the rows of an earlier service to the next one, and others find the blocks in them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.machine.engines import SmallEngine, key_of
from tests.machine.hosts import service_in_thread
from tests.machine.test_peer_rows import BLOCKS, MADE, MEMORY, TIERS, are_found, engine_of, owner_of_blocks, peers_of
from tiering.errors import TieringError
from tiering.machine.claim import KeptRegion
from tiering.machine.options import PEERS_TIER
from tiering.machine.peer_rows import PeerRows
from tiering.machine.regions import Regions
from tiering.machine.service import MachineService
from tiering.primary.memory.region import make_sealed
from tiering.testing.clock import until

HELD = ExitStack()


def restarted(path: Path, *engines: SmallEngine) -> MachineService:
    """Return another service at a path whose service has ended, once its engines are served."""
    running = HELD.enter_context(service_in_thread(path, MEMORY, peers=PeerRows))
    for engine in engines:
        assert all(engine.serving(at) for at in range(len(TIERS)))
    return running


def is_orphan(engine: Any) -> bool:
    """Return True if all connections of an engine have ended."""
    tiers, keeper = engine.manager.secondary_tiers, engine.manager.primary_tier.keeper
    return keeper._connection is None and not any(tier.serving for tier in tiers)


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[tuple[SmallEngine, SmallEngine, Path]]:
    """Two engines, one with blocks, whose service has ended."""
    path = tmp_path / "cache.sock"
    with HELD:
        with service_in_thread(path, MEMORY, peers=PeerRows) as service:
            one = owner_of_blocks(service)
            two = engine_of(service)
        for engine in (one, two):
            assert engine.settle(partial(is_orphan, engine))
        yield one, two, path
        while MADE:
            MADE.pop().close()


def test_rows_are_found_after_a_restart_of_the_service(orphans: tuple[SmallEngine, SmallEngine, Path]) -> None:
    one, two, path = orphans
    one.store([50])  # while there is no service
    service = restarted(path, one, two)
    assert are_found(service, one, 9)
    assert two.load([*BLOCKS, 50]) == ([*BLOCKS, 50], [])
    assert two.stat("promotions", PEERS_TIER) == 9
    one.store([51])
    assert one.settle(lambda: peers_of(service).get_stats().blocks >= 10)
    assert two.load([51]) == ([51], [])


def test_all_rows_of_a_large_region_are_found_after_a_restart(
    orphans: tuple[SmallEngine, SmallEngine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are reported faster than their digests are computed."""
    monkeypatch.setattr("tiering.machine.regions.MOST_PENDING", 4)
    one, two, path = orphans
    assert are_found(restarted(path, one, two), one, 8)


def test_rows_that_were_taken_while_the_service_was_away_are_not_found(
    orphans: tuple[SmallEngine, SmallEngine, Path],
) -> None:
    one, two, path = orphans
    one.manager.primary_tier.drop([key_of(number) for number in range(4)])
    service = restarted(path, one, two)
    assert are_found(service, one, 4)
    assert two.load(BLOCKS) == (BLOCKS[4:], [])


def test_rows_that_a_service_has_not_made_go_to_no_later_engine(
    orphans: tuple[SmallEngine, SmallEngine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that have mapped them may live on without a connection to it."""
    monkeypatch.setattr("tiering.machine.regions.LEAVE_SECONDS", 0.0)
    one, two, path = orphans
    service = restarted(path, one, two)
    assert are_found(service, one, 8)
    MADE.remove(one)
    one.close()
    assert two.settle(lambda: len(service.regions) == 1)
    assert two.load(BLOCKS) == ([], [])
    heir = engine_of(service)
    assert heir.load(BLOCKS) == ([], [])
    assert service.regions.handed_over == 0


@pytest.mark.parametrize("what", ["one descriptor", "no seal", "too small", "twice"])
def test_rows_that_are_shown_against_the_rules_are_refused(
    orphans: tuple[SmallEngine, SmallEngine, Path], what: str
) -> None:
    one, two, path = orphans
    service = restarted(path, one, two)
    assert are_found(service, one, 8)
    region: Any = one.manager.primary_tier.keeper._region  # type: ignore[union-attr]
    fds = [os.dup(region.fd), os.dup(region.words_fd)]
    if what != "twice":
        os.close(fds[1])
        if what == "one descriptor":
            del fds[1]
        else:
            fds[1] = os.memfd_create("words") if what == "no seal" else make_sealed("words", 8)
            if what == "no seal":
                os.ftruncate(fds[1], 8 * len(region.words))
    connections = len(service._peers)
    assert region.shown(fds) is None
    assert until(lambda: len(service._peers) == connections)
    assert len(service.regions) == 2
    assert two.load(BLOCKS) == (BLOCKS, [])


def refuse(*_: object) -> None:
    raise TieringError("no room for rows")


def test_the_next_service_is_shown_rows_at_once_that_the_last_one_has_refused(
    orphans: tuple[SmallEngine, SmallEngine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.machine.ledger.SHOW_AGAIN", 600.0)
    one, two, path = orphans
    keeper: Any = one.manager.primary_tier.keeper
    keeper._show_wait = 600.0
    with monkeypatch.context() as during:
        during.setattr(Regions, "show", refuse)
        with service_in_thread(path, MEMORY, peers=PeerRows) as service:
            assert one.settle(lambda: service._refused > 0 and not keeper._showing)
        assert one.settle(partial(is_orphan, one))
    assert are_found(restarted(path, one, two), one, 8)
    assert two.load(BLOCKS) == (BLOCKS, [])


def test_a_service_that_refuses_the_reports_is_not_asked_in_a_loop(
    orphans: tuple[SmallEngine, SmallEngine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, path = orphans
    monkeypatch.setattr("tiering.machine.ledger.SHOW_AGAIN", 0.05)
    monkeypatch.setattr("tiering.machine.regions.LEAVE_SECONDS", 0.0)
    monkeypatch.setattr(Regions, "take", refuse)
    keeper: Any = one.manager.primary_tier.keeper
    keeper._show_wait = 0.05
    restarted(path, one, two)
    assert one.settle(lambda: keeper._show_wait >= 0.4)


def test_rows_are_not_shown_to_a_service_that_has_just_let_go_of_them(
    orphans: tuple[SmallEngine, SmallEngine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiers learn of the end of a service in a thread of their own, perhaps after the rows."""
    one, two, path = orphans
    service = restarted(path, one, two)
    assert are_found(service, one, 8)
    keeper: Any = one.manager.primary_tier.keeper
    keeper._show_due = 0.0
    asked = Mock(return_value=None)
    monkeypatch.setattr(KeptRegion, "shown", asked)
    keeper._connection.socket.shutdown(socket.SHUT_RDWR)
    assert one.settle(lambda: keeper._connection is None)
    assert not one.settle(lambda: asked.called, 0.5)
