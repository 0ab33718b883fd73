"""The object tier on Azure Blob Storage: the conformance suites on Azurite, identities, and faults."""

from __future__ import annotations

import base64
import datetime
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import obstore
import pytest
from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas
from obstore.exceptions import PreconditionError

from tests.fake_s3 import FakeS3, Trouble
from tests.servers import AzureEndpoint, azurite
from tests.tiers.object.blocks import block, content, empty
from tests.tiers.object.lying_proxy import Lie, lying_proxy
from tests.tiers.object.rigs import tier_of
from tests.tiers.object.suites import FleetSuite, RealStoreSuite
from tests.tls import make_authority
from tiering.errors import OutOfSpaceError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.medium.block_store import Done
from tiering.testing.clock import until
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object import ObjectOptions, suspects
from tiers.object.bucket_options import SUSPECTS
from tiers.object.clouds import make_cloud
from tiers.object.faults import STORE_FAILURES, summary
from tiers.object.sender import Verb
from tiers.object.store import ObjectStore
from tiers.object.suspects import Machine

VARIABLES = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_FEDERATED_TOKEN_FILE",
    "AZURE_CLIENT_SECRET",
)


@pytest.mark.azurite
class TestStoreOnAzurite(RealStoreSuite):
    serve = staticmethod(azurite)
    many = 300


@pytest.mark.azurite
class TestTierOnAzurite(FleetSuite):
    serve = staticmethod(azurite)
    proves = False

    def test_a_bit_that_a_proxy_flips_in_every_read_deletes_nothing(self, machines: Callable[[], TierRig]) -> None:
        machines().store(K[:8])
        before = self.raw_places()
        endpoint = self.options.endpoint or ""
        with lying_proxy(endpoint, Lie.SAME_BIT) as proxy:
            self.options = self.options.model_copy(update={"endpoint_url": proxy.endpoint + urlsplit(endpoint).path})
            sick = machines()
            assert sick.load(K[:8]) == []
            sick.wait(lambda: len(self.bucket.names(f"{self.options.prefix}documents/{SUSPECTS}")) == 8)
            assert sick.close()
        assert self.raw_places() == before

    def test_a_second_machine_confirms_a_broken_block(
        self, machines: Callable[[], TierRig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(suspects, "APART", 0.0)
        one, other = machines(), machines()
        for name, rig in (("one", one), ("other", other)):
            tier_of(rig)._store._suspects._machine = Machine.of(name, name, name)
        one.store(K[:1])
        (place,) = self.raw_places()
        self.raw_write(place, self.raw_read(place)[:-1] + b"?")
        assert one.load(K[:1]) == []
        one.wait(lambda: self.bucket.names(f"{self.options.prefix}documents/{SUSPECTS}"))
        assert self.raw_places() == [place]
        assert other.load(K[:1]) == []
        other.wait(lambda: not self.raw_places())
        other.wait(lambda: other.store(K[:1]) == K[:1])
        assert other.load(K[:1]) == K[:1]


# ---------------------------------------------------------------------------------------------------------- identities


class _Identities(ThreadingHTTPServer):
    """Gives tokens as the metadata service of a machine does."""

    daemon_threads = True
    given = 0
    lifetime = 3600
    """Seconds for which a token is valid."""

    def token(self) -> str:
        """Return a token that Azurite takes: it reads the claims, and does not check the signature."""
        self.given += 1
        now = int(time.time())
        claims: dict[str, object] = {
            "aud": "https://storage.azure.com",
            "iss": "https://sts.windows.net/ab1f708d-50f6-404c-a006-d71b2ac7a606/",
            "iat": now - 60,
            "nbf": now - 60,
            "exp": now + 3600,
            "oid": "23657296-5cd5-45b0-a809-d972a7f4dfe1",
            "tid": "ab1f708d-50f6-404c-a006-d71b2ac7a606",
            "jti": str(self.given),
        }
        parts: tuple[dict[str, object], ...] = ({"alg": "RS256", "typ": "JWT"}, claims, {})
        return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


class _Metadata(BaseHTTPRequestHandler):
    server: _Identities

    def do_GET(self) -> None:
        ends = int(time.time()) + self.server.lifetime
        body = json.dumps(
            {"access_token": self.server.token(), "expires_on": str(ends), "token_type": "Bearer"}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def identities() -> Iterator[_Identities]:
    server = _Identities(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="identities")
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureEndpoint]:
    """Azurite with identities, which needs https; its certificate is of an authority of its own."""
    made = make_authority(tmp_path_factory.mktemp("authority"))
    arguments = ("--cert", str(made.certificate), "--key", str(made.key), "--oauth", "basic")
    with azurite(*arguments, ca_file=made.ca_file) as endpoint:
        endpoint.make_bucket("kv-cache").close()
        yield endpoint


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without credentials of Azure."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "kvaccount")
    return monkeypatch


def round_trip(store: ObjectStore) -> None:
    """Store, load, and delete one version of a block."""
    store.open()
    try:
        stored, loaded = block("ns/1"), empty("ns/1")
        store.put_one(stored)
        assert store.get_one(loaded) is Done.DONE
        assert content(loaded) == content(stored)
        found = store.read_again("ns/1", 1 << 20)
        assert found is not None
        assert not store.delete_version("ns/1", '"0x0"')
        assert store.delete_version("ns/1", found.version)
        assert store.get_one(empty("ns/1")) is Done.ABSENT
    finally:
        store.close()


@pytest.mark.azurite
def test_a_managed_identity_is_enough_for_everything(secure: AzureEndpoint, bare: pytest.MonkeyPatch) -> None:
    with identities() as server:
        bare.setenv("AZURE_IDENTITY_ENDPOINT", f"http://127.0.0.1:{server.server_port}/token")
        round_trip(ObjectStore(ObjectOptions.model_validate(secure.words("kv-cache", "identity"))))
        assert server.given >= 1


@pytest.mark.azurite
def test_the_service_itself_refuses_to_delete_another_version(secure: AzureEndpoint, bare: pytest.MonkeyPatch) -> None:
    """Another machine may store a block between the store's own comparison and the deletion."""
    bare.setenv("AZURE_STORAGE_ACCOUNT_KEY", secure.account_key)
    options = ObjectOptions.model_validate(secure.words("kv-cache", "condition"))
    cloud = make_cloud(options)
    client, name = cloud.connect(), "condition/blocks/ns/1"
    obstore.put(client, name, b"good", use_multipart=False)
    with pytest.raises(PreconditionError):
        obstore.delete(cloud.deleter(name, '"0x0"'), name)
    assert obstore.get(client, name).bytes().to_bytes() == b"good"
    obstore.delete(cloud.deleter(name, cloud.version(obstore.head(client, name))), name)
    with pytest.raises(FileNotFoundError):
        obstore.head(client, name)


@pytest.mark.azurite
def test_a_token_is_renewed_before_it_ends(secure: AzureEndpoint, bare: pytest.MonkeyPatch) -> None:
    with identities() as server:
        server.lifetime = 60
        bare.setenv("AZURE_IDENTITY_ENDPOINT", f"http://127.0.0.1:{server.server_port}/token")
        store = ObjectStore(ObjectOptions.model_validate(secure.words("kv-cache", "renewal")))
        store.open()
        before = server.given
        # A token is kept for a moment, even if it is about to end.
        assert until(lambda: store.get_one(empty("ns/1")) is Done.ABSENT and server.given > before)
        store.close()


@pytest.mark.azurite
def test_a_signature_is_enough_for_everything(secure: AzureEndpoint, bare: pytest.MonkeyPatch) -> None:
    signature = generate_account_sas(
        "kvaccount",
        secure.account_key,
        ResourceTypes(container=True, object=True),
        AccountSasPermissions(read=True, write=True, delete=True, list=True, create=True),
        datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1),
    )
    bare.setenv("AZURE_STORAGE_SAS_TOKEN", signature)
    round_trip(ObjectStore(ObjectOptions.model_validate(secure.words("kv-cache", "signature"))))


@pytest.mark.azurite
def test_a_key_that_was_changed_is_used_from_the_first_refusal_on(
    secure: AzureEndpoint, bare: pytest.MonkeyPatch
) -> None:
    options = ObjectOptions.model_validate(secure.words("kv-cache", "rotation"))
    cloud = make_cloud(options)
    store = ObjectStore(options, cloud)
    bare.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"withdrawn").decode())
    store.requests.use(cloud.connect())
    with pytest.raises(PermanentStoreError, match="correct AZURE_STORAGE_ACCOUNT_KEY"):
        store.get_one(empty("ns/1"))
    bare.setenv("AZURE_STORAGE_ACCOUNT_KEY", secure.account_key)
    bare.setattr(store.requests, "_look_again_at", 0.0)
    assert store.get_one(empty("ns/1")) is Done.ABSENT
    store.close()


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.fixture
def store(fake: FakeS3, bare: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    """A store whose server answers the requests of Azure's protocol with the faults that it is told to."""
    bare.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"hunter2-hunter2").decode())
    options = ObjectOptions.model_validate(
        {"url": f"az://{fake.bucket}/prod", "endpoint_url": fake.endpoint, "check_existing": False}
    )
    cloud = make_cloud(options)
    made = ObjectStore(options, cloud)
    made.requests.use(cloud.connect())
    yield made
    made.close()


def failure(store: ObjectStore) -> StoreError:
    with pytest.raises(StoreError) as caught:
        store.put_one(block("ns/1"))
    return caught.value


@pytest.mark.parametrize(
    ("status", "code", "kind", "text"),
    [
        (403, "AuthenticationFailed", PermanentStoreError, "wrong or has expired"),
        (403, "AuthorizationPermissionMismatch", PermanentStoreError, "role Storage Blob Data Contributor"),
        (401, "NoAuthenticationInformation", PermanentStoreError, "no credentials"),
        (404, "ContainerNotFound", PermanentStoreError, "no such container"),
        (409, "ContainerBeingDeleted", PermanentStoreError, "being deleted"),
        (413, "RequestBodyTooLarge", OutOfSpaceError, "no object of this size"),
        (429, "TooManyRequests", TemporaryStoreError, "throttles"),
        (503, "ServerBusy", TemporaryStoreError, "throttles"),
        (500, "OperationTimedOut", TemporaryStoreError, "did not finish in time"),
    ],
)
def test_a_failure_names_its_cause(
    fake: FakeS3, store: ObjectStore, status: int, code: str, kind: type[StoreError], text: str
) -> None:
    fake.fail(status, method="PUT", times=9, code=code)
    found = failure(store)
    assert type(found) is kind
    assert text in str(found)
    assert f"{status} {code} from 127.0.0.1:" in str(found)


def test_a_blob_that_is_there_counts_as_stored_without_another_request(fake: FakeS3, store: ObjectStore) -> None:
    fake.fail(409, method="PUT", code="BlobAlreadyExists")
    store.put_one(block("ns/1"))
    assert store.requests.sent[Verb.HEAD] == 0


def test_after_another_conflict_a_request_decides_whether_the_blob_is_there(fake: FakeS3, store: ObjectStore) -> None:
    fake.fail(409, method="PUT", code="LeaseIdMissing")
    fake.fail(404, method="HEAD")
    assert isinstance(failure(store), TemporaryStoreError)
    assert store.requests.sent[Verb.HEAD] == 1


@pytest.mark.parametrize("trouble", [Trouble.RESET, 500, 403])
def test_no_message_shows_a_signature(fake: FakeS3, store: ObjectStore, trouble: Trouble | int) -> None:
    """The address of a conditional deletion is signed."""
    found = store._cloud.deleter("prod/blocks/ns/1", '"0x1"')
    fake.fail(trouble, times=9, code="Injected")
    with pytest.raises(STORE_FAILURES) as caught:
        obstore.delete(found, "prod/blocks/ns/1")
    assert "sig=" in str(caught.value)
    assert "sig=" not in str(store._cloud.dialect.translate(caught.value, "delete"))
    assert "sig=" not in summary(caught.value)


def test_a_machine_without_an_identity_is_told_what_is_missing(fake: FakeS3, bare: pytest.MonkeyPatch) -> None:
    fake.fail(400, times=99)
    bare.setenv("AZURE_IDENTITY_ENDPOINT", f"{fake.endpoint}/token")
    made = ObjectStore(ObjectOptions.model_validate({"url": "az://kv-cache", "endpoint_url": fake.endpoint}))
    with pytest.raises(PermanentStoreError, match=r"request for an access token failed; correct AZURE_STORAGE"):
        made.open()
