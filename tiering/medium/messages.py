"""Work of a tier's I/O side other than transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class IoTask(NamedTuple):
    """Work on the I/O side other than jobs: probes, epochs, recovery."""

    name: str
    """Name of the task, for threads and logs."""
    run: Callable[[], Any]
    """Function that an I/O thread calls."""
    on_done: Callable[[Any, BaseException | None], None]
    """Function that receives the result of ``run``, or the exception that ``run`` raised.

    ``IoHost.poll`` calls it on the scheduler's thread.
    """
    lookup: bool = False
    """True: the task runs on the threads for lookups, so that lookups and jobs never wait for one another.

    Default False.
    """
    expires: float = float("inf")
    """Time in monotonic seconds after which a lookup that has not begun fails; default: none."""
