"""The speeds of one life of a manager, in the next one on the same disk."""

from __future__ import annotations

from pathlib import Path

from tests.config.test_stack import MODEL
from tiering.config.stack import open_manager
from tiering.spec import read_stack


def test_a_disk_keeps_the_speeds_for_the_next_engine(tmp_path: Path) -> None:
    local = {"type": "local", "path": str(tmp_path), "capacity": "64MiB", "load_or_compute": "auto"}
    stack = read_stack({"primary": {"capacity": "1MiB"}, "secondary": [local]})
    for life, seconds in enumerate((0.1, 0.05)):
        with open_manager(stack, 4096, MODEL) as manager:
            manager.note_compute([0.1], is_assumed=True)
            kept = manager._kept_speeds
            assert kept is not None
            steps = 0
            while kept.gathering and steps < 100:
                manager.on_schedule_end()
                manager.wait_until(lambda: False, 0.05)
                steps += 1
            assert list(manager._search.compute_seconds) == [seconds]
            manager.note_compute([0.05])
        assert len(list(tmp_path.rglob("speeds-*"))) == 1, life
