"""Authorities and proxies of the environment count for the data path and for administration alike."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError

from tests.fake_gcs import fake_gcs
from tests.fake_s3 import FakeS3, fake_s3
from tests.tiers.object.blocks import block, content, empty
from tests.tls import Authority, make_authority
from tiering.errors import StoreError
from tiering.medium.block_store import Done
from tiers.object import ObjectOptions
from tiers.object.cloud import AUTHORITIES
from tiers.object.s3.credentials import CredentialSource
from tiers.object.s3.settings import make_client
from tiers.object.store import ObjectStore

PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the network variables of this machine out of the environment."""
    for name in (*AUTHORITIES, *PROXIES, *map(str.lower, PROXIES), "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in FakeS3().environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def server(authority: Authority) -> Iterator[FakeS3]:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.certificate, authority.key)
    with fake_s3(tls) as running:
        yield running


def options(server: FakeS3, **words: object) -> ObjectOptions:
    chosen = {"url": f"s3://{server.bucket}/prod", "endpoint_url": server.endpoint, "request_timeout": "5s"}
    return ObjectOptions.model_validate(chosen | words)


def move_a_block(chosen: ObjectOptions) -> None:
    """Use the data path.

    Raises:
        StoreError: the data path cannot reach the server.
    """
    store = ObjectStore(chosen)
    store.open()
    try:
        stored, loaded = block("ns/1"), empty("ns/1")
        store.put_one(stored)
        assert store.get_one(loaded) is Done.DONE
        assert content(loaded) == content(stored)
    finally:
        store.close()


def administer(chosen: ObjectOptions) -> None:
    """Use boto3, as administration does.

    Raises:
        BotoCoreError: administration cannot reach the server.
    """
    with contextlib.closing(make_client(chosen, CredentialSource(None))) as client:
        client.head_bucket(Bucket=chosen.bucket)


def test_an_unknown_authority_is_refused_by_both(server: FakeS3) -> None:
    with pytest.raises(StoreError, match="TLS: the certificate is refused"):
        move_a_block(options(server))
    with pytest.raises(BotoCoreError, match="CERTIFICATE_VERIFY_FAILED"):
        administer(options(server))
    assert not server.seen


@pytest.mark.parametrize("name", AUTHORITIES)
def test_an_authority_of_the_environment_is_trusted_by_both(
    server: FakeS3, authority: Authority, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, str(authority.ca_file))
    move_a_block(options(server))
    administer(options(server))


def test_a_ca_file_counts_before_the_environment(
    server: FakeS3, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/bundle.pem")
    move_a_block(options(server, ca_file=str(authority.ca_file)))
    administer(options(server, ca_file=str(authority.ca_file)))
    with pytest.raises(StoreError, match=r"AWS_CA_BUNDLE /nowhere/bundle\.pem cannot be read"):
        move_a_block(options(server))


def test_a_file_may_have_many_authorities(
    server: FakeS3, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = make_authority(tmp_path / "other")
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(other.ca_file.read_bytes() + authority.ca_file.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    move_a_block(options(server))
    administer(options(server))


# ------------------------------------------------------------------------------------------------------------- proxies


class Proxy(ThreadingHTTPServer):
    """A proxy that passes bytes on, and records where to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Tunnel)
        self.passed: list[str] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Tunnel(BaseHTTPRequestHandler):
    server: Proxy

    def do_CONNECT(self) -> None:
        self.server.passed.append(self.path)
        host, _, port = self.path.partition(":")
        with socket.create_connection((host, int(port)), 5) as target:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: target, target: self.connection}
            while not self.server.closing.is_set():
                for end in select.select(list(ends), [], [], 0.05)[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    ends[end].sendall(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    running = Proxy()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, name="proxy")
    thread.start()
    yield running
    running.closing.set()
    running.shutdown()
    running.server_close()
    thread.join()


@pytest.mark.parametrize("use", [move_a_block, administer])
@pytest.mark.parametrize("name", ["HTTPS_PROXY", "https_proxy"])
def test_a_proxy_of_the_environment_is_used_by_both(
    server: FakeS3,
    authority: Authority,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[ObjectOptions], None],
    name: str,
) -> None:
    monkeypatch.setenv(name, proxy.url)
    use(options(server, ca_file=str(authority.ca_file)))
    assert set(proxy.passed) == {server.endpoint.removeprefix("https://")}


@pytest.mark.parametrize("use", [move_a_block, administer])
def test_a_host_without_a_proxy_is_reached_directly_by_both(
    server: FakeS3,
    authority: Authority,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[ObjectOptions], None],
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", "internal.example,127.0.0.1")
    use(options(server, ca_file=str(authority.ca_file)))
    assert proxy.passed == []


def test_other_clouds_use_authorities_and_proxies_too(
    authority: Authority, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority.certificate, authority.key)
    with fake_gcs(tls) as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(authority.ca_file))
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        move_a_block(ObjectOptions.model_validate(running.words(running.bucket, "prod")))
        assert set(proxy.passed) == {running.endpoint.removeprefix("https://")}
