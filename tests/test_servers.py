"""The object stores for tests keep the rules that the tiers rely on."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from tests.servers import moto_server

WRITERS = 8
ROUNDS = 40


def test_of_puts_at_once_that_ask_for_an_absent_object_one_succeeds_on_moto(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's threads are switched after every few instructions."""
    (tmp_path / "sitecustomize.py").write_text("import sys\n\nsys.setswitchinterval(1e-6)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split()]))
    with moto_server() as endpoint, ThreadPoolExecutor(WRITERS) as pool:
        bucket = endpoint.make_bucket("bucket")
        clients = [endpoint.client() for _ in range(WRITERS)]

        def put(writer: int, name: str) -> int:
            try:
                clients[writer].put_object(Bucket="bucket", Key=name, Body=b"of one", IfNoneMatch="*")
            except ClientError as error:
                return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
            return 200

        try:
            for round_ in range(ROUNDS):
                answers = pool.map(put, range(WRITERS), [f"object-{round_}"] * WRITERS)
                assert sorted(answers) == [200] + [412] * (WRITERS - 1)
        finally:
            for client in clients:
                client.close()
            bucket.close()
