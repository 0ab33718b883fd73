"""Log lines about failures: the cause first, the object last; and a class for each kind of failure."""

from __future__ import annotations

import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from tests.fake_s3 import FakeS3, Trouble
from tests.tiers.object.blocks import block, empty
from tiering.errors import OutOfSpaceError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.medium.block_store import Done
from tiers.object.faults import Dialect
from tiers.object.store import ObjectStore

Open = Callable[..., ObjectStore]


def get_failure(store: ObjectStore) -> StoreError:
    (outcome,) = store.get([empty("ns/1")])
    assert isinstance(outcome, StoreError)
    return outcome


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "QuotaExceeded", OutOfSpaceError, "over a quota"),
        (507, "InsufficientStorage", OutOfSpaceError, "out of space"),
        (507, "XMinioStorageFull", OutOfSpaceError, "out of space"),
        (413, "EntityTooLarge", OutOfSpaceError, "of this size"),
        (413, "Injected", OutOfSpaceError, "of this size"),
        (403, "InvalidAccessKeyId", PermanentStoreError, "wrong access key"),
        (403, "SignatureDoesNotMatch", PermanentStoreError, "wrong access key or secret"),
        (403, "ExpiredToken", PermanentStoreError, "temporary credentials have expired"),
        (403, "RequestTimeTooSkewed", PermanentStoreError, "clock is wrong"),
        (403, "AccessDenied", PermanentStoreError, "no permission"),
        (404, "NoSuchBucket", PermanentStoreError, "no such bucket"),
        (400, "AuthorizationHeaderMalformed", PermanentStoreError, "wrong region"),
        (503, "SlowDown", TemporaryStoreError, "throttles"),
        (500, "InternalError", TemporaryStoreError, "Internal Server Error"),
    ],
)
def test_the_cause_comes_first_and_the_object_last(
    fake: FakeS3, open_store: Open, status: int, code: str, kind: type[StoreError], words: str
) -> None:
    store = open_store(check_existing=False)
    fake.fail(status, method="PUT", part="ns/1", code=code)
    (outcome,) = store.put([block("ns/1")])
    assert type(outcome) is kind
    text = str(outcome)
    assert text.startswith(f"{status} {code} from {fake.endpoint.removeprefix('http://')}: ")
    assert text.endswith("(put prod/blocks/ns/1)")
    assert words in text


def test_nothing_listening(open_store: Open) -> None:
    with pytest.raises(TemporaryStoreError, match=r"^127\.0\.0\.1:1: connection refused: .*\(list s3://kv-cache"):
        open_store(endpoint_url="http://127.0.0.1:1")


@pytest.mark.parametrize("step", ["tcp open error", "dns error"])
def test_a_process_without_free_file_descriptors(step: str) -> None:
    text = (
        "Generic S3 error: Error performing PUT http://127.0.0.1:9/b/y in 235.6µs - HTTP error: error sending request"
        f'\n\nDebug source:\nConnectError("{step}", Os {{ code: 24, kind: TooManyOpenFiles, '
        'message: "Too many open files" })'
    )
    failure = Dialect({}, keys="", bucket="").translate(GenericError(text), "put y")
    assert isinstance(failure, TemporaryStoreError)
    assert "too many open files; raise the limit (ulimit -n" in str(failure)


def test_a_name_without_an_address(open_store: Open) -> None:
    with pytest.raises(TemporaryStoreError, match=r"^no-such-host\.invalid:9000: DNS: .* has no address"):
        open_store(endpoint_url="http://no-such-host.invalid:9000")


def test_no_answer_in_time(fake: FakeS3, open_store: Open) -> None:
    store = open_store(request_timeout="1s")
    fake.fail(Trouble.HANG, method="GET", part="ns/1")
    assert "no answer within the time-out" in str(get_failure(store))


def test_a_reset_and_a_body_cut_short(fake: FakeS3, open_store: Open) -> None:
    store = open_store()
    fake.fail(Trouble.RESET, method="GET", part="ns/1")
    assert "reset before an answer" in str(get_failure(store))
    fake.objects["prod/blocks/ns/1"] = bytes(4096)
    fake.fail(Trouble.CUT_BODY, method="GET", part="ns/1")
    assert str(get_failure(store)).startswith("the body ended early (get prod/blocks/ns/1)")


@pytest.fixture
def https(tmp_path: Path) -> Iterator[str]:
    """A server with a certificate that no client trusts."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_certificate_that_is_not_trusted(https: str, open_store: Open) -> None:
    with pytest.raises(
        TemporaryStoreError, match=r": TLS: the certificate is refused \(\w+\); name its authority with"
    ):
        open_store(endpoint_url=https)


def test_an_absent_object_needs_no_diagnosis(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store, diagnosed = open_store(), list[BaseException]()
    monkeypatch.setattr(Dialect, "diagnose", lambda dialect, error: diagnosed.append(error))
    assert store.probe(["ns/absent"]).held == (False,)
    assert store.get([empty("ns/absent")]) == [Done.ABSENT]
    assert diagnosed == []
