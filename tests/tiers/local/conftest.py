"""Children are forked from a server with all imports done, so that tests can afford hundreds of them."""

from __future__ import annotations

import multiprocessing

multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["tests.tiers.local.crash_child", "tests.tiers.local.test_lock"]
)
