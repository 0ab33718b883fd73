"""A failed step of ``check`` names one cause and the one remedy of that cause, for every cloud."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import obstore
import pytest

from tests.fake_gcs import fake_gcs
from tests.fake_s3 import FakeS3
from tiering.admin.records import Finding, Severity
from tiers.object.bucket_options import BucketOptions, ObjectOptions
from tiers.object.permissions import probe_bucket

S3 = ("s3", {"list": "s3:ListBucket on the bucket", "put": "s3:PutObject on the objects"})
GCS = ("gs", {"list": "storage.objects.list on the bucket", "put": "storage.objects.create on the bucket"})


@pytest.fixture
def gcs() -> Iterator[Any]:
    with fake_gcs() as running:
        yield running


@pytest.fixture
def server(request: pytest.FixtureRequest, scheme: str, monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    found: FakeS3 = request.getfixturevalue("gcs" if scheme == "gs" else "fake")
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"hunter2-hunter2").decode())
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    return found


def options(server: FakeS3, scheme: str) -> BucketOptions:
    url = f"{scheme}://{server.bucket}/prod"
    return ObjectOptions.model_validate({"url": url, "endpoint_url": server.endpoint})


def failed(server: FakeS3, scheme: str, step: str) -> Finding:
    found = {finding.subject: finding for finding in probe_bucket(options(server, scheme), 64 << 20)}
    assert found[step].severity is Severity.ERROR
    return found[step]


CASES = [
    # scheme, status, code, part of the text, the whole remedy
    ("s3", 404, "NoSuchBucket", "no such bucket", "create it, or correct bucket or endpoint_url"),
    ("gs", 404, "NoSuchBucket", "no such bucket", "create it, or correct url or endpoint_url"),
    ("az", 404, "ContainerNotFound", "no such container", "create it, or correct url, account or endpoint_url"),
    ("s3", 403, "InvalidAccessKeyId", "wrong access key", "correct the keys that boto3's chain finds"),
    ("s3", 403, "ExpiredToken", "have expired", "renew them, or give this machine a role"),
    ("s3", 401, "Unauthorized", "refused", "correct the keys that boto3's chain finds"),
    ("gs", 403, "InvalidSecurity", "credentials are refused", "correct GOOGLE_APPLICATION_CREDENTIALS"),
    ("gs", 401, "AuthenticationRequired", "no credentials", "correct GOOGLE_APPLICATION_CREDENTIALS"),
    ("az", 403, "AuthenticationFailed", "signature or token is wrong", "correct AZURE_STORAGE_ACCOUNT_KEY"),
    ("s3", 403, "AccessDenied", "no permission", f"grant {S3[1]['list']}"),
    ("gs", 403, "AccessDenied", "no permission", f"grant {GCS[1]['list']}"),
    ("az", 403, "AuthorizationPermissionMismatch", "no permission", "grant Microsoft.Storage/.../blobs/read on the"),
    ("s3", 403, "RequestTimeTooSkewed", "clock is wrong", "set it (NTP)"),
    ("s3", 400, "AuthorizationHeaderMalformed", "wrong region", "set region to that of the bucket"),
    ("s3", 503, "SlowDown", "throttles", "try again; if it lasts, ask the service for more requests per second"),
    ("s3", 403, "Nameless", "refused", "correct the credentials or the clock, or grant s3:ListBucket on the bucket"),
]


@pytest.mark.parametrize(("scheme", "status", "code", "text", "remedy"), CASES)
def test_a_listing_that_fails_names_the_remedy_of_its_cause_alone(
    server: FakeS3, scheme: str, status: int, code: str, text: str, remedy: str
) -> None:
    server.fail(status, method="GET", times=99, code=code)
    found = failed(server, scheme, "list")
    assert text in found.text
    assert found.remedy.startswith(remedy)
    assert found.remedy not in found.text
    assert remedy.startswith("grant") == found.remedy.startswith("grant")


@pytest.mark.parametrize(("scheme", "permissions"), [S3, GCS], ids=["s3", "gs"])
def test_a_refusal_after_a_step_that_was_allowed_lacks_a_permission(
    server: FakeS3, scheme: str, permissions: dict[str, str]
) -> None:
    server.fail(403, method="PUT", times=99, code="Nameless")
    assert failed(server, scheme, "put").remedy == f"grant {permissions['put']}"


def test_an_endpoint_that_nobody_listens_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    nobody = ObjectOptions.model_validate({"url": "s3://kv-cache", "endpoint_url": "http://127.0.0.1:9"})
    (found,) = [finding for finding in probe_bucket(nobody, 64 << 20) if finding.subject == "list"]
    assert "connection refused: no server listens there" in found.text
    assert found.remedy == "correct endpoint_url, or start the server"


def test_bytes_that_are_not_those_written_are_no_lack_of_permission(
    fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda client, name, data, **words: put(client, name, b"another", **words))
    found = failed(fake, "s3", "get")
    assert "7 bytes came back that are not the 64 written" in found.text
    assert found.remedy == "look for a proxy or a cache between this machine and the service"


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_bucket_with_object_lock_is_named_with_the_remedy(server: FakeS3, scheme: str) -> None:
    text = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"
    server.fail(400, method="PUT", times=1 << 30, code="InvalidRequest", message=text)
    found = failed(server, scheme, "put")
    assert "object lock" in found.text
    assert found.remedy == "use a bucket without object lock, or remove its default retention"
