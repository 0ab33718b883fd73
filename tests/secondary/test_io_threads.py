"""The threads of a tier's I/O side: how they are woken."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from tiering.secondary.io.threads import IoThreads
from tiering.testing.clock import until


def test_a_burst_of_items_wakes_one_thread_which_wakes_the_next() -> None:
    items: SimpleQueue[str] = SimpleQueue()
    begun, gate, stopping = threading.Event(), threading.Event(), threading.Event()
    looks: list[str] = []
    done: list[str] = []

    def work() -> bool:
        looks.append(threading.current_thread().name)
        if items.empty():
            return False
        item = items.get()
        if not items.empty():
            threads.wake()
        if item == "first":
            begun.set()
            gate.wait()
        done.append(item)
        return True

    threads = IoThreads(
        "disk",
        1,
        work=work,
        room=lambda: 0,
        stuck=lambda: 0,
        abandon=lambda: None,
        refused=lambda threads: None,
        stopping=stopping,
        clock=time.monotonic,
    )
    try:
        items.put("first")
        threads.wake()
        assert begun.wait(10.0)
        for number in range(5):
            items.put(str(number))
            threads.wake()
        gate.set()
        assert until(lambda: threads.idle == 1 and len(done) == 6)
        assert len(looks) <= 6 + 2, "six items, and a look before each wait for a token"
    finally:
        gate.set()
        stopping.set()
        threads.stop()
        assert until(lambda: not threads.running())
