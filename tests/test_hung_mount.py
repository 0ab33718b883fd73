"""A medium that hangs delays only the opening of tiers, up to ``open_deadline``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiering import ModelIdentity, load_stack, open_manager
from tiering.testing.clock import until

MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="hung mounts")
MNT_DETACH = 2

_LOOKS = ("stat", "lstat", "readlink", "scandir", "listdir", "mkdir", "open", "statvfs", "access")


def local(path: Path, **words: object) -> dict[str, object]:
    return {"type": "local", "path": str(path), "capacity": "16MiB", "segment_size": "4MiB", **words}


@pytest.fixture
def untouchable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose every access fails the test."""
    place = tmp_path / "mount"

    def guarded(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def guard(path: Any, *arguments: Any, **words: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(place)):
                pytest.fail(f"os.{name} would hang at {path}")
            return look(path, *arguments, **words)

        return guard

    for name in _LOOKS:
        monkeypatch.setattr(os, name, guarded(name, getattr(os, name)))
    return place


def test_validation_looks_at_no_directory(untouchable: Path) -> None:
    sections = [local(untouchable / "a", name="a"), local(untouchable / "x" / ".." / "b", name="b")]
    assert len(load_stack({"primary": {"capacity": "1MiB"}, "secondary": sections}).secondary) == 2


@contextlib.contextmanager
def hung(place: Path) -> Iterator[None]:
    """A file system at ``place`` whose server never answers."""
    place.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error}")
    words = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"hung", os.fsencode(place), b"fuse", 0, words.encode()):
        os.close(server)
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        libc.umount2(os.fsencode(place), MNT_DETACH)
        os.close(server)  # waiting callers get an error


def test_a_hung_mount_costs_the_start_no_more_than_the_deadline(tmp_path: Path) -> None:
    started = threading.Event()
    sections = [local(tmp_path / "mount" / "kv", name="hung"), local(tmp_path / "disk", name="disk")]

    def start() -> None:
        stack = load_stack({"primary": {"capacity": "1MiB"}, "secondary": sections, "open_deadline": "1s"})
        with open_manager(stack, 4096, MODEL) as manager:

            def available() -> dict[str, int]:
                manager.on_schedule_end()
                return {name: tier["available"] for name, tier in manager.get_stats()["tiers"].items()}

            assert until(lambda: available() == {"hung": 0, "disk": 1})
            started.set()

    thread = threading.Thread(target=start, daemon=True)
    with hung(tmp_path / "mount"):
        thread.start()
        assert started.wait(60), "the start hangs with the mount"
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("second", ["linked", "linked/inside"])
def test_two_paths_to_one_directory_are_found_when_it_is_locked(tmp_path: Path, second: str, caplog: Any) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "disk")
    sections = [local(tmp_path / "disk", name="a"), local(tmp_path / second, name="b")]
    with open_manager(load_stack({"primary": {"capacity": "1MiB"}, "secondary": sections}), 4096, MODEL) as manager:
        until(lambda: "tier b: not in service" in caplog.text)
        assert manager.get_stats()["tiers"]["a"]["available"] == 1
    assert "two tiers of this process" in caplog.text or "another tier of this process" in caplog.text
    assert "of its own, and mind symbolic links" in caplog.text


def test_replicas_share_the_directory_above_theirs(tmp_path: Path) -> None:
    stack = load_stack({"primary": {"capacity": "1MiB"}, "secondary": [local(tmp_path / "disk", required=True)]})
    with open_manager(stack, 4096, MODEL), open_manager(stack, 4096, MODEL, replica="1") as other:
        assert other.get_stats()["tiers"]["local"]["available"] == 1
