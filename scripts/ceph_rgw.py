"""Run a one-node Ceph object store (RGW) on loopback, in memory: a real S3 server for tests.

It needs Debian's packages (``apt-get install --no-install-recommends ceph-mon ceph-osd radosgw ceph-common``, or
``--install`` here) and no running services. All its files are in one directory; its processes are ended by their ids.
Authentication inside the cluster is off. S3 requests are signed and checked as everywhere.

    python scripts/ceph_rgw.py               # starts, prints endpoint and credentials as shell exports, runs until ^C
    python scripts/ceph_rgw.py --install     # installs the packages unless they are there (root)
    python scripts/ceph_rgw.py -- COMMAND    # runs a command with these exports, then stops
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw", "ceph-common")
PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
ATTEMPTS = 5
MEMORY = 3 << 30
"""Bytes that the store may hold."""


def installed() -> bool:
    """Return True if every program is on the path."""
    return all(shutil.which(program) is not None for program in PROGRAMS)


def install() -> None:
    """Install the packages with apt (root)."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-qq"], check=True, env=environment)
    subprocess.run(
        ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *PACKAGES], check=True, env=environment
    )


@dataclass(slots=True)
class CephRgw:
    """A monitor, a store in memory and a gateway, in ``directory``.

    Call :meth:`start`, use ``endpoint`` and the keys, then call :meth:`stop`.
    """

    directory: Path
    access_key: str = field(default_factory=lambda: secrets.token_hex(10).upper())
    secret_key: str = field(default_factory=lambda: secrets.token_hex(20))
    endpoint: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, timeout: float = 120.0) -> None:
        """Start all processes, and return when the gateway answers.

        A start that fails is tried again from scratch.

        Raises:
            RuntimeError: the start failed; the message has the end of the log, and no process is left running.
        """
        give_up = time.monotonic() + timeout
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._start(give_up)
                return
            except (RuntimeError, subprocess.SubprocessError) as error:
                problem = f"{error}\n{self._log_tail()}"
                self.stop()
                if attempt == ATTEMPTS or time.monotonic() > give_up:
                    raise RuntimeError(f"Ceph did not start: {problem}") from error
                shutil.rmtree(self.directory)
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the processes, the gateway first. May be called twice."""
        while self.processes:
            process = self.processes.pop()
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, give_up: float) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        fsid, osd_uuid, monitor_port = str(uuid.uuid4()), str(uuid.uuid4()), _free_port()
        monitor = f"127.0.0.1:{monitor_port}"
        self._write_configuration(fsid, monitor)
        keyring, monmap = str(self.directory / "keyring"), str(self.directory / "monmap")
        run = self._run
        run(give_up, "monmaptool", "--create", "--clobber", "--addv", "a", f"[v1:{monitor}]", "--fsid", fsid, monmap)
        run(give_up, "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        run(
            give_up,
            "ceph-authtool",
            keyring,
            "--gen-key",
            "-n",
            "client.admin",
            "--cap",
            "mon",
            "allow *",
            "--cap",
            "osd",
            "allow *",
        )
        run(give_up, "ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        self._spawn("ceph-mon", "-i", "a", "--public-addr", monitor, "-f")
        self._ceph(give_up, "osd", "new", osd_uuid)
        self._ceph(give_up, "osd", "crush", "add", "osd.0", "1.0", "host=h", "root=default")
        run(give_up, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
        self._spawn("ceph-osd", "-i", "0", "-f")
        self._wait(give_up, "the object store", lambda: "1 up" in self._ceph(give_up, "osd", "stat"))
        run(
            give_up, "radosgw-admin", "user", "create", "--uid=kv", "--display-name=kv",
            f"--access-key={self.access_key}", f"--secret-key={self.secret_key}",
        )  # fmt: skip
        port = _free_port()
        gateway = ("--auth_supported", "none", "--auth_client_required", "none", "--ms_mon_client_mode", "crc")
        self._spawn(
            "radosgw", "-n", "client.rgw", "-f", "--rgw_frontends", f"beast endpoint=127.0.0.1:{port}", *gateway
        )
        self._wait(give_up, "the gateway", lambda: _answers(port))
        self.endpoint = f"http://127.0.0.1:{port}"

    def _write_configuration(self, fsid: str, monitor: str) -> None:
        directory = self.directory
        settings = {
            "fsid": fsid,
            "mon_host": f"[v1:{monitor}]",
            "auth_cluster_required": "none",
            "auth_service_required": "none",
            "auth_client_required": "none",
            "osd_pool_default_size": "1",
            "osd_pool_default_min_size": "1",
            "osd_pool_default_pg_num": "8",
            "osd_pool_default_pg_autoscale_mode": "off",
            "osd_crush_chooseleaf_type": "0",
            # A starting OSD that sends these updates before the monitor's map has come exits, because the monitor
            # refuses them ("wrong fsid"). _start places the OSD itself.
            "osd_crush_update_on_start": "false",
            "osd_class_update_on_start": "false",
            "mon_allow_pool_size_one": "true",
            "mon_data_avail_crit": "0",
            "osd_objectstore": "memstore",
            "memstore_device_bytes": str(MEMORY),
            "osd_class_load_list": "*",
            "osd_class_default_list": "*",
            "public_network": "127.0.0.0/8",
            "ms_bind_msgr2": "false",
            "rgw_dns_name": "localhost",
            "debug_rgw": "0",
            "mon_data": f"{directory}/mon",
            "osd_data": f"{directory}/osd",
            "run_dir": str(directory),
            "log_file": f"{directory}/$name.log",
            "mon_cluster_log_file": f"{directory}/cluster.log",
            "pid_file": f"{directory}/$name.pid",
            "crash_dir": str(directory),
            "admin_socket": f"{directory}/$name.asok",
            "keyring": f"{directory}/keyring",
        }
        text = "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
        (directory / "ceph.conf").write_text(text)
        (directory / "osd").mkdir(exist_ok=True)

    def _environment(self) -> dict[str, str]:
        return os.environ | {"CEPH_CONF": str(self.directory / "ceph.conf")}

    def _run(self, give_up: float, *command: str) -> str:
        remaining = max(give_up - time.monotonic(), 1.0)
        done = subprocess.run(
            command,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=remaining,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            shown = [word for word in command if self.secret_key not in word]
            raise RuntimeError(f"{' '.join(shown)} failed: {done.stderr.strip()[-2000:]}")
        return done.stdout + done.stderr

    def _ceph(self, give_up: float, *words: str) -> str:
        # The client sometimes sends its command before the monitor's map has come, and the monitor then answers EPERM
        # because of a wrong fsid.
        while True:
            try:
                return self._run(give_up, "ceph", *words)
            except RuntimeError as error:
                if "EPERM" not in str(error) or time.monotonic() > give_up:
                    raise

    def _spawn(self, *command: str) -> None:
        with (self.directory / "output.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        self.processes.append(process)

    def _wait(self, give_up: float, what: str, ready: Callable[[], bool]) -> None:
        while not ready():
            for process in self.processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args!r} ended with {process.returncode} while waiting for {what}")
            if time.monotonic() > give_up:
                raise RuntimeError(f"{what} did not come up in time")
            time.sleep(0.2)

    def _log_tail(self) -> str:
        log = self.directory / "output.log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else ""


@contextlib.contextmanager
def serving() -> Iterator[CephRgw]:
    """A running Ceph RGW in a temporary directory, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="ceph-", ignore_cleanup_errors=True) as directory:
        ceph = CephRgw(Path(directory))
        ceph.start()
        try:
            yield ceph
        finally:
            ceph.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """The command line described in the module's docstring."""
    parser = argparse.ArgumentParser(description="Run Ceph RGW in memory on loopback.")
    parser.add_argument("--install", action="store_true", help="install Debian's packages and end (root)")
    parser.add_argument("command", nargs="*", help="a command to run while it serves (after --)")
    chosen = parser.parse_args(arguments)
    if chosen.install:
        if not installed():
            install()
        return 0
    if not installed():
        sys.stderr.write(f"missing: apt-get install --no-install-recommends {' '.join(PACKAGES)}\n")
        return 2
    # Raised wherever it comes, so that the processes are ended on the way out.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with serving() as ceph:
        exports = {
            "AWS_ACCESS_KEY_ID": ceph.access_key,
            "AWS_SECRET_ACCESS_KEY": ceph.secret_key,
            "AWS_ENDPOINT_URL_S3": ceph.endpoint,
        }
        if chosen.command:
            return subprocess.run(chosen.command, env=os.environ | exports, check=False).returncode
        sys.stdout.write("".join(f"export {name}={value}\n" for name, value in exports.items()))
        sys.stdout.flush()
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
