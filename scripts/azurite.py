"""Run Azurite, a server of Azure Blob Storage by Microsoft, on loopback and in memory for tests.

It needs Node.js with npm. ``--install`` here puts the package into the user's cache directory, and nothing else on the
machine changes. Requests are signed and checked as everywhere.

    python scripts/azurite.py               # starts, prints endpoint and credentials as shell exports, runs until ^C
    python scripts/azurite.py --install     # installs the package unless it is there
    python scripts/azurite.py -- COMMAND    # runs a command with these exports, then stops
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VERSION = "3.35.0"
ACCOUNT = "kvaccount"
START_TIMEOUT = 60.0
"""Longest time until the server listens, in seconds."""

_LISTENS = re.compile(r"listens on (https?://[0-9.]+:[0-9]+)")


class Azurite(NamedTuple):
    """A running server: its endpoint with the account, the account's key, and its process."""

    endpoint: str
    account_key: str
    process: subprocess.Popen[bytes]

    def environment(self) -> dict[str, str]:
        """Return the variables that make the object tier use this server's account."""
        return {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": self.account_key}


def directory() -> Path:
    """Return the directory of the installed package."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "kv-tiering" / f"azurite-{VERSION}"


def why_not() -> str | None:
    """Return the reason why Azurite cannot run here, with the remedy; None if it can."""
    if shutil.which("node") is None:
        return "Node.js is not installed, which Azurite needs"
    if not _program().is_file():
        return "Azurite is not installed; run: python scripts/azurite.py --install"
    return None


def install() -> None:
    """Install the package with npm."""
    place = directory()
    place.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--no-fund", "--no-audit", "--ignore-scripts", "--prefix", str(place)]
    subprocess.run([*command, f"azurite@{VERSION}"], check=True, stdin=subprocess.DEVNULL)


def start(log: Path, *arguments: str) -> Azurite:
    """Start a server that writes to ``log``, and return when it listens.

    Args:
        log: file for the server's output.
        arguments: further arguments of the program.

    Raises:
        RuntimeError: the server ended or did not listen in time; the message has its output.
    """
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    command = ["node", str(_program()), "--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
    command += ["--skipApiVersionCheck", "--disableTelemetry", *arguments]
    environment = os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment)
    try:
        give_up = time.monotonic() + START_TIMEOUT
        while (found := _LISTENS.search(log.read_text(errors="replace"))) is None:
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"Azurite did not start: {log.read_text(errors='replace')[-2000:]}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
    except BaseException:
        stop(process)
        raise
    return Azurite(f"{found[1]}/{ACCOUNT}", key, process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the server. May be called twice."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Azurite]:
    """A running server, for as long as the context lasts.

    Args:
        arguments: further arguments of the program.
    """
    with tempfile.TemporaryDirectory(prefix="azurite-") as scratch:
        server = start(Path(scratch) / "azurite.log", *arguments)
        try:
            yield server
        finally:
            stop(server.process)


def _program() -> Path:
    return directory() / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


def main(arguments: list[str]) -> int:
    """The command line described in the module's docstring."""
    parser = argparse.ArgumentParser(description="Run Azurite in memory on loopback.")
    parser.add_argument("--install", action="store_true", help="install the package with npm and end")
    parser.add_argument("command", nargs="*", help="a command to run while it serves (after --)")
    chosen = parser.parse_args(arguments)
    if chosen.install:
        if not _program().is_file():
            install()
        return 0
    reason = why_not()
    if reason is not None:
        sys.stderr.write(f"{reason}\n")
        return 2
    # Raised wherever it comes, so that the process is ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with serving() as server:
        exports = server.environment() | {"AZURE_STORAGE_ENDPOINT": server.endpoint}
        if chosen.command:
            return subprocess.run(chosen.command, env=os.environ | exports, check=False).returncode
        sys.stdout.write("".join(f"export {name}={value}\n" for name, value in exports.items()))
        sys.stdout.flush()
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
