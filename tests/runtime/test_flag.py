"""A flag wakes its waiting thread, and its setter takes no lock."""

from __future__ import annotations

import threading

from tiering.runtime.flag import Flag


def test_a_wait_ends_when_the_flag_is_set() -> None:
    flag, woken = Flag(), threading.Event()

    def wait() -> None:
        while not flag.wait(60):
            pass
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    flag.set()
    assert woken.wait(10)
    thread.join()
    assert flag.wait(60)


def test_a_flag_that_is_not_set_ends_the_wait_by_its_timeout() -> None:
    flag = Flag()
    assert not flag.wait(0.001)
    assert not flag.wait(-1.0)
    assert not flag.is_set()


def test_a_cleared_flag_can_be_set_again_and_keeps_nothing() -> None:
    flag = Flag()
    for _ in range(3):
        flag.set()
        flag.set()
        assert flag.is_set()
        flag.clear()
        assert not flag.is_set()
        assert not flag.wait(0.0)
    assert flag._tokens.qsize() == 0


def test_nothing_done_before_a_set_is_missed() -> None:
    flag, seen = Flag(), list[int]()
    done: list[int] = []

    def look() -> None:
        while len(seen) < 2000:
            flag.wait(60)
            flag.clear()
            while done:
                seen.append(done.pop())

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(2000):
        done.append(number)
        flag.set()
    thread.join(60)
    assert sorted(seen) == list(range(2000))
