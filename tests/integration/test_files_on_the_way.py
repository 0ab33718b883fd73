"""The files that a reader opens to follow one block from the GPU to the disk.

The walk is the one of ``docs/design.md``: an engine stores a prompt through the connector into a CPU tier and a local
tier. A file counts if one of its functions runs while a function of the walk is active. Ticks, which every step of the
engine makes with or without blocks, do not count, nor does the end of the request. The size advisor does not count
either: it watches the keys, and nothing depends on it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import tiering
from examples.mini_engine import Engine, Request
from tests.mini_engine.helpers import one_row, options, prompt

ROOT = Path(tiering.__file__).parent.parent

WALK = {
    "tiering/connector/stores.py": {"StorePlanner.plan"},
    "tiering/connector/scheduler.py": {"OffloadingConnectorScheduler._process"},
    "tiering/connector/worker.py": {
        "OffloadingConnectorWorker.prepare_store_kv",
        "OffloadingConnectorWorker.handle_preemptions",
    },
    "tiering/copy/host.py": {"HostCopyHandler._copy"},
    "tiering/manager/manager.py": {
        "TieringOffloadingManager.prepare_store",
        "TieringOffloadingManager.complete_store",
    },
    "tiering/secondary/io/host.py": {"IoHost._run_unit"},
}
"""The functions of the walk, by file."""

ASIDE = {"tick", "_tick", "expire", "on_step", "_sweep", "_close", "_wake"}
"""Names of functions that run with or without blocks, or that end a request or wake a thread."""

FROM_THE_MANAGER = ("tiering/manager", "tiering/primary", "tiering/table", "tiering/secondary", "tiers/")
MOST_FROM_THE_MANAGER = 17
MOST = 29


class Walk:
    """Records the files that run while a function of the walk is active, on all threads."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.entered: set[str] = set()
        self.recording = False
        self._threads = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in {"call", "return"} or not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        file = Path(frame.f_code.co_filename).relative_to(ROOT).as_posix()
        if not file.startswith(("tiering/", "tiers/")) or file.startswith("tiering/advisor/"):
            return
        active: list[FrameType] = self._threads.__dict__.setdefault("active", [])
        if event == "return":
            if active and active[-1] is frame:
                active.pop()
            return
        name = frame.f_code.co_qualname
        if name in WALK.get(file, ()):
            self.entered.add(name)
            active.append(frame)
        elif frame.f_code.co_name in ASIDE:
            active.append(frame)
        if self.recording and active and active[-1].f_code.co_name not in ASIDE:
            self.files.add(file)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and all new threads; files are recorded while ``recording`` is True."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def walk_of_a_store(path: Path) -> Walk:
    """Return the walk of the blocks of one prompt through an engine that has stored another one before."""
    walk = Walk()
    local = {"type": "local", "path": str(path), "capacity": "16MiB", "segment_size": "4MiB"}
    stack = {"primary": {"capacity": 40 * one_row()}, "secondary": [local]}
    with walk.installed(), Engine(options(num_blocks=64, stack=stack)) as engine:
        for number in range(2):  # The first prompt starts threads and finds the owner of the manager.
            walk.recording = number == 1
            engine.run([Request(f"store {number}", prompt(number, 40), 4)])
            assert engine.settle()
    return walk


def test_a_stored_block_crosses_few_files(tmp_path: Path) -> None:
    walk = walk_of_a_store(tmp_path)
    assert walk.entered == set().union(*WALK.values())
    files = sorted(walk.files)
    assert "tiers/local/segments.py" in files
    beyond = [file for file in files if file.startswith(FROM_THE_MANAGER)]
    assert len(beyond) <= MOST_FROM_THE_MANAGER, f"{len(beyond)} files from the manager to the disk: {beyond}"
    assert len(files) <= MOST, f"{len(files)} files from the GPU to the disk: {files}"
