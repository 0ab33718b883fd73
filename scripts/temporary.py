"""Temporary files of a run of tests or benchmarks, all in one directory that goes with the run."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def temporary_files_in(directory: Path) -> Iterator[None]:
    """Make ``directory`` the temporary directory of this process, and remove it at the end.

    Child processes that are started meanwhile use it too. Killed processes leave files there, and so do libraries that
    remove nothing: vLLM leaves its sockets.
    """
    variable, chosen = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = chosen
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable
        for path in directory.iterdir():
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
            elif not path.name.startswith("pymp-"):  # multiprocessing removes its own at the end of the process
                shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            directory.rmdir()


def clean_up_on_sigterm() -> None:
    """Make SIGTERM interrupt this process like Ctrl-C, so that it removes its files and ends its servers.

    A forked child dies of the signal as usual. The main thread calls this function.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.register_at_fork(after_in_child=_die_of_sigterm)


def _die_of_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
