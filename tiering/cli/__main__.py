"""The entry point of ``python -m tiering.cli``, which ``kv-tiering`` calls too."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from typing import NoReturn

NEEDED = frozenset({"click", "rich", "aiofiles", "prometheus_client"})
"""Packages of the extra ``cli``."""


def main() -> None:
    """Run the command line and exit with its code.

    Ctrl-C before and after the run ends the process at once. During the run it is a ``KeyboardInterrupt``, so that the
    command can tidy up. A process that ignores Ctrl-C, as one in the background does, keeps ignoring it.
    """
    _open_closed_streams()
    heard = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        gc.disable()  # all that is imported stays until the end; to look through it takes a third of a short command
        from tiering.cli.app import INTERRUPTED, run

        gc.freeze()
        gc.enable()
        code = INTERRUPTED
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run()
        if heard:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in NEEDED:
            raise
        sys.stderr.write(
            f"kv-tiering: the command line needs the package {error.name}; install kv-tiering with its extra cli "
            "(in a clone: pip install '.[cli]')\n"
        )
        code = 2
    except KeyboardInterrupt:
        # It came between the run and the change of the handler.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end(code)


def _open_closed_streams() -> None:
    """Open the null device in the place of each standard stream that the caller has closed.

    Otherwise a file of a tier would get the number of the stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _end(code: int) -> NoReturn:
    """End the process with ``code``.

    The threads of obstore may enter the interpreter while it ends, which aborts the process. So the interpreter does
    not end once obstore is loaded: its output is flushed, and the process exits.
    """
    if "obstore" not in sys.modules:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:  # its reader has gone
                stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
