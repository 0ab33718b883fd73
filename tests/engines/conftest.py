"""A medium that hangs, for the doors through which other engines reach a stack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Let the medium hang in calls of one kind, until the test has ended."""
    opened = threading.Event()

    def hang(name: str) -> threading.Event:
        called = threading.Event()

        def method(*arguments: Any) -> Any:
            called.set()
            opened.wait()
            raise OSError("gone")

        monkeypatch.setattr(f"tiers.memory.MemoryStore.{name}", method)
        return called

    yield hang
    opened.set()
