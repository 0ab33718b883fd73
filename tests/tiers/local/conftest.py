"""Children of these tests are forked from a server that has imported what they need, so that hundreds of them are
affordable."""

from __future__ import annotations

import multiprocessing

multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["tests.tiers.local.crash_child", "tests.tiers.local.test_lock"]
)
