"""The object store: one object per block, moved by obstore, which releases the GIL meanwhile.

Blocks are named ``<prefix>blocks/<place>``, documents ``<prefix>documents/<name>``. The prefixes differ because a
lifecycle rule that lets blocks expire must never reach a document. A lost epoch document would make blocks from before
a reset readable again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store as ObjectClient

from tiering.block_store import BlockIO, BlockStore, Done, Place, RawBlock, StoreProbe, StoreTraits
from tiering.errors import CorruptBlockError, PermanentStoreError, StoreError, TemporaryStoreError
from tiers.s3.admin import check_lifecycle
from tiers.s3.credentials import DEFAULT_REGION, CredentialSource
from tiers.s3.faults import STORE_FAILURES, http_status, translate
from tiers.s3.options import S3Options
from tiers.s3.runtime import start_runtime

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, S3Config

logger = logging.getLogger("kv_tiering.s3")

BLOCKS = "blocks/"
"""Begins the names of block objects, after the prefix of the options."""
DOCUMENTS = "documents/"
"""Begins the names of documents, after the prefix of the options."""

_CONDITION_UNKNOWN = frozenset({400, 501})
"""Answers of services that know no conditional deletion."""
_MD5 = re.compile(r'"?[0-9a-fA-F]{32}"?')
"""ETag of an object that was uploaded whole and is not encrypted by KMS: the MD5 of its bytes."""
_LIST_CHUNK = 1000
_LAST = "~"
"""Sorts behind every name that this store uses."""


class S3Store(BlockStore):
    """Blocks in a bucket. Several threads may call it at once.

    A put is one request (two with ``check_existing``) and therefore atomic. With ``check_existing`` or
    ``conditional_put`` an existing object is not replaced: its name contains the namespace and the key, so it holds the
    same block. A get checks the length before it copies; the frame's checksum verifies the content. Each call makes one
    attempt; a layer above retries.

    Args:
        options: The tier's options.
        credentials: Source of credentials (default: boto3's chain with the options' profile).
    """

    traits = StoreTraits(medium="OBJECT", variable_size=True)

    def __init__(self, options: S3Options, credentials: CredentialSource | None = None) -> None:
        start_runtime()
        self._options = options
        self._credentials = CredentialSource(options.profile) if credentials is None else credentials
        self._blocks = f"{options.prefix}{BLOCKS}"
        self._documents = f"{options.prefix}{DOCUMENTS}"
        self._client: ObjectClient | None = None
        self._askers: ThreadPoolExecutor | None = None
        self._requests = 0
        self._count_lock = threading.Lock()
        self._lifecycle_checked = False

    def __repr__(self) -> str:
        return f"S3Store({self._options.location})"

    @property
    def requests(self) -> int:
        """Requests sent so far. The service charges for each."""
        return self._requests

    # ---------------------------------------------------------------------------------------------------- life cycle

    def open(self) -> None:
        """Look up credentials and send the bucket one cheap request.

        Raises:
            StoreError: The bucket cannot be used. The message says how to correct this.
        """
        self.close()
        self._credentials.forget()
        self._credentials()
        try:
            client = self._connect()
            self._count()
            for _ in obstore.list(client, self._blocks.rstrip("/"), offset=f"{self._blocks}{_LAST}", chunk_size=1):
                break
        except STORE_FAILURES as error:
            raise translate(error, f"asking for {self._options.location}") from error
        self._client = client
        self._askers = ThreadPoolExecutor(min(self._options.max_inflight, 8), thread_name_prefix="s3-probe")
        self._check_lifecycle()

    def close(self) -> None:
        self._client = None
        askers, self._askers = self._askers, None
        if askers is not None:
            askers.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------------------------------------------------- data

    def put_one(self, block: BlockIO) -> None:
        client, name = self._open_client(), self._name(block.place)
        if self._options.check_existing and self._is_there(client, name):
            return
        try:
            self._count()
            # Two buffers, one request: neither this module nor obstore copies the row.
            obstore.put(
                client,
                name,
                (block.header, block.payload),
                use_multipart=False,
                mode="create" if self._options.conditional_put else "overwrite",
            )
        except AlreadyExistsError:
            return
        except STORE_FAILURES as error:
            raise translate(error, f"put {name}") from error

    def get_one(self, block: BlockIO) -> Done:
        client, name = self._open_client(), self._name(block.place)
        try:
            self._count()
            result = obstore.get(client, name)
            length, header_bytes = result.meta["size"], len(block.header)
            if not header_bytes <= length <= header_bytes + len(block.payload):
                raise CorruptBlockError(
                    f"object {name} has {length} bytes, not {header_bytes} to {header_bytes + len(block.payload)}"
                )
            body = np.frombuffer(memoryview(result.bytes()), np.uint8)
        except FileNotFoundError:
            return Done.ABSENT
        except STORE_FAILURES as error:
            raise translate(error, f"get {name}") from error
        if len(body) != length:
            raise CorruptBlockError(f"object {name} was announced with {length} bytes and had {len(body)}")
        np.copyto(np.frombuffer(block.header, np.uint8), body[:header_bytes])
        np.copyto(np.frombuffer(block.payload, np.uint8)[: length - header_bytes], body[header_bytes:])
        block.filled = length - header_bytes
        return Done.DONE

    def delete(self, places: Sequence[Place]) -> None:
        self._delete_names(self._open_client(), [self._name(place) for place in places])

    def read_again(self, place: Place, limit: int) -> RawBlock | None:
        self._open_client()
        name = self._name(place)
        try:
            self._count()
            # A client of its own has connections of its own.
            result = obstore.get(self._connect(), name)
            size, version = result.meta["size"], result.meta["e_tag"] or ""
            content = result.bytes().to_bytes() if size <= limit else b""
        except FileNotFoundError:
            return None
        except STORE_FAILURES as error:
            raise translate(error, f"get {name} again") from error
        if content and self._options.sse != "aws:kms" and _MD5.fullmatch(version):
            digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if digest != version.strip('"').lower():
                raise TemporaryStoreError(
                    f"get {name} again: the bytes differ from their ETag; suspect a proxy or this machine's memory"
                )
        return RawBlock(content, size, version)

    def delete_version(self, place: Place, version: str) -> bool:
        """Delete an object by a conditional request.

        A comparison comes first, for services that ignore the condition.
        """
        client, name = self._open_client(), self._name(place)
        try:
            self._count()
            if obstore.head(client, name)["e_tag"] != version:
                return False
            self._count()
            try:
                obstore.delete(self._connect(if_match=version), [name])
            except STORE_FAILURES as error:
                if http_status(error) not in _CONDITION_UNKNOWN:
                    raise
                self._count()
                obstore.delete(client, [name])
        except (FileNotFoundError, PreconditionError, AlreadyExistsError):
            return False
        except STORE_FAILURES as error:
            raise translate(error, f"delete {name}") from error
        return True

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        client, askers = self._client, self._askers
        if client is None or askers is None:
            return StoreProbe((None,) * len(places))

        def ask(place: Place) -> bool | None:
            try:
                return self._is_there(client, self._name(place))
            except StoreError:
                return None

        if len(places) == 1:
            return StoreProbe((ask(places[0]),))
        try:
            return StoreProbe(tuple(askers.map(ask, places)))
        except RuntimeError:
            # No further thread can be started at present. The bucket has not failed: probe on this thread.
            return StoreProbe(tuple(map(ask, places)))

    # --------------------------------------------------------------------------------------------- small documents

    def read_document(self, name: str) -> bytes | None:
        client = self._open_client()
        try:
            self._count()
            return obstore.get(client, f"{self._documents}{name}").bytes().to_bytes()
        except FileNotFoundError:
            return None
        except STORE_FAILURES as error:
            raise translate(error, f"get document {name}") from error

    def write_document(self, name: str, data: bytes) -> None:
        client = self._open_client()
        try:
            self._count()
            obstore.put(client, f"{self._documents}{name}", data, use_multipart=False)
        except STORE_FAILURES as error:
            raise translate(error, f"put document {name}") from error

    def create_document(self, name: str, data: bytes) -> bytes | None:
        if not self._options.conditional_put:
            # The service cannot order the writers: machines that start together may get different answers.
            return super().create_document(name, data)
        # Some services ignore the condition of a put. This read leaves only concurrent writers to disagree there.
        found = self.read_document(name)
        if found is not None:
            return found
        try:
            self._count()
            obstore.put(self._open_client(), f"{self._documents}{name}", data, use_multipart=False, mode="create")
        except AlreadyExistsError:
            logger.debug("document %s was already created by another process", name)
        except STORE_FAILURES as error:
            raise translate(error, f"create document {name}") from error
        return self.read_document(name)

    def list_documents(self, prefix: str) -> Iterable[str]:
        start = f"{self._documents}{prefix}"
        paths = (item["path"] for objects in self.list_document_objects() for item in objects)
        return [path.removeprefix(self._documents) for path in paths if path.startswith(start)]

    def remove_document(self, name: str) -> None:
        self._delete_names(self._open_client(), [f"{self._documents}{name}"])

    # ---------------------------------------------------------------------------------------------- many at a time

    def reclaim(self, place_prefix: str) -> int:
        client, removed = self._open_client(), 0
        for objects in self.list_objects(place_prefix):
            self._delete_names(client, [item["path"] for item in objects])
            removed += len(objects)
        return removed

    def list_objects(self, place_prefix: str = "") -> Iterator[Sequence[ObjectMeta]]:
        """Yield the blocks whose places start with ``place_prefix``, up to 1,000 at a time.

        An item's ``path`` is the object's name in the bucket, which :meth:`delete_objects` takes.

        Raises:
            StoreError: The bucket cannot be listed.
        """
        client = self._open_client()
        start = f"{self._blocks}{place_prefix}"
        # obstore lists below whole path segments only; the filter handles a prefix that ends within a segment.
        directory = start.rpartition("/")[0]
        try:
            self._count()
            for objects in obstore.list(client, directory, chunk_size=_LIST_CHUNK):
                chosen = [item for item in objects if item["path"].startswith(start)]
                if chosen:
                    yield chosen
                self._count()
        except STORE_FAILURES as error:
            raise translate(error, f"list {start}") from error

    def list_document_objects(self) -> Iterator[Sequence[ObjectMeta]]:
        """Yield all documents, up to 1,000 at a time.

        Raises:
            StoreError: The bucket cannot be listed.
        """
        client = self._open_client()
        try:
            self._count()
            for objects in obstore.list(client, self._documents.rstrip("/"), chunk_size=_LIST_CHUNK):
                yield objects
                self._count()
        except STORE_FAILURES as error:
            raise translate(error, f"list {self._documents}") from error

    def delete_objects(self, names: Sequence[str]) -> None:
        """Delete objects by their names in the bucket.

        Raises:
            StoreError: Objects cannot be deleted.
        """
        self._delete_names(self._open_client(), list(names))

    # --------------------------------------------------------------------------------------------------------- inner

    def _connect(self, if_match: str | None = None) -> ObjectClient:
        """Return a new client, with connections of its own.

        Args:
            if_match: version that every object must have for a request of this client (default: any).

        Raises:
            PermanentStoreError: the CA file cannot be read.
        """
        options = self._options
        region = options.region or self._credentials.region or DEFAULT_REGION
        config: S3Config = {
            "region": region,
            "unsigned_payload": True,
            "virtual_hosted_style_request": not options.uses_path_style,
            "disable_bulk_delete": not options.bulk_delete,
        }
        endpoint = options.endpoint
        if endpoint is not None:
            if not options.uses_path_style:
                parts = urlsplit(endpoint)
                endpoint = f"{parts.scheme}://{options.bucket}.{parts.netloc}"
            config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
        if options.sse != "none":
            config["server_side_encryption"] = options.sse
        if options.sse_kms_key_id is not None:
            config["sse_kms_key_id"] = options.sse_kms_key_id
        timeout = min(options.request_timeout, options.deadline)
        client_options: ClientConfig = {
            "allow_http": (endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=min(options.connect_timeout, timeout)),
            "timeout": timedelta(seconds=timeout),
        }
        if if_match is not None:
            # obstore has no conditional deletion, and its bulk deletion has no condition per object.
            config["disable_bulk_delete"] = True
            client_options["default_headers"] = {"if-match": if_match}
        if options.ca_file is not None:
            try:
                client_options["root_certificate"] = options.ca_file.read_bytes()
            except OSError as error:
                raise PermanentStoreError(
                    f"ca_file {options.ca_file} cannot be read ({error}); correct the path"
                ) from error
        return ObjectClient(
            options.bucket,
            config=config,
            client_options=client_options,
            retry_config={"max_retries": 0},
            credential_provider=self._credentials,
        )

    def _check_lifecycle(self) -> None:
        """Warn once if ``ttl`` is not enforced by the bucket. Blocks that stay too long are no outage."""
        if self._options.ttl is None or self._lifecycle_checked:
            return
        problem = check_lifecycle(self._options, self._credentials, self._blocks, self._documents)
        self._lifecycle_checked = True
        if problem is not None:
            logger.warning("%s: %s", self._options.location, problem)

    def _open_client(self) -> ObjectClient:
        client = self._client
        if client is None:
            raise PermanentStoreError(f"{self._options.location} is not open")
        return client

    def _name(self, place: Place) -> str:
        return f"{self._blocks}{place}"

    def _count(self) -> None:
        with self._count_lock:
            self._requests += 1

    def _is_there(self, client: ObjectClient, name: str) -> bool:
        try:
            self._count()
            obstore.head(client, name)
        except FileNotFoundError:
            return False
        except STORE_FAILURES as error:
            raise translate(error, f"head {name}") from error
        return True

    def _delete_names(self, client: ObjectClient, names: list[str]) -> None:
        if not names:
            return
        try:
            self._count()
            obstore.delete(client, names)
        except FileNotFoundError:
            # Some services answer 404 for an absent object, which ends a batch early: delete one by one.
            if len(names) > 1:
                for name in names:
                    self._delete_names(client, [name])
        except STORE_FAILURES as error:
            raise translate(error, f"delete {len(names)} object(s)") from error
