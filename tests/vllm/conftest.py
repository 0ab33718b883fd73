"""The real engine, in-process where that suffices: tiny models, float32, greedy decoding.

Needs vLLM, which has an environment of its own (``make test-vllm``); without vLLM no test here is collected.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import S3Endpoint, rclone_server
from tests.vllm import shared_memory
from tests.vllm.rig import COMMON, prepare_environment, prompt

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
if not collect_ignore_glob:
    prepare_environment()
    # Engines of several test processes compute at the same time, and their threads would spin for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


TIMEOUT = 1500
"""Time limit of a test in seconds.

On a machine that does other work, the start of a server alone takes minutes.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail if shared memory is left behind; threads may stay, because tests share engines."""
    yield
    assert shared_memory.is_clean(), f"left in /dev/shm: {shared_memory.files()}"


def _vllm_segments() -> set[Path]:
    """Return the files that vLLM and Python's multiprocessing have in /dev/shm."""
    return {file for pattern in ("psm_*", "sem.mp-*", "vllm_dist_*") for file in Path("/dev/shm").glob(pattern)}


@pytest.fixture(autouse=True, scope="session")
def _removes_what_killed_servers_leave() -> Iterator[None]:
    """Remove the shared memory that killed vLLM processes leave: new files that no process maps."""
    before = _vllm_segments()
    yield
    appeared = _vllm_segments() - before  # before the maps are read: later files may belong to another process
    mapped: set[str] = set()  # inodes, because the map of a semaphore shows the temporary name of its creation
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            mapped.update(line.split(maxsplit=5)[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line)
        except OSError:  # the process has ended, or has another user
            continue
    for file in appeared:
        with contextlib.suppress(FileNotFoundError):
            if str(file.stat().st_ino) not in mapped:
                file.unlink()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that most tests use."""
    from tests.vllm.models import write_llama

    model = write_llama(tmp_path_factory.mktemp("llama"))
    COMMON[model] = [prompt(seed) for seed in range(100)]
    return model


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Endpoint]:
    """A server of buckets for one test, whose credentials are in the environment."""
    with rclone_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
