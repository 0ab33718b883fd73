"""Coordination whose threads cannot be started when its tier opens."""

from __future__ import annotations

import pytest

from tests.thread_limit import ThreadLimit
from tests.tiers.coordination.fleet import Fleet, ready
from tiering.testing.clock import until


def test_threads_that_could_not_be_started_are_started_later(
    fleet: Fleet, thread_limit: ThreadLimit, caplog: pytest.LogCaptureFixture
) -> None:
    thread_limit.reach("-fleet")
    rig = fleet.machine(whole=False)
    assert until(lambda: thread_limit.refused)
    assert not ready(rig)
    thread_limit.leave()
    rig.wait(lambda: ready(rig))
    assert caplog.text.count("coordination needs a thread") == 1
