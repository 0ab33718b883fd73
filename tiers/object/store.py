"""The object store: one object per block, moved by obstore, which releases the GIL meanwhile.

Blocks are named ``<prefix>blocks/<place>``, documents ``<prefix>documents/<name>``. The prefixes differ because a
lifecycle rule that lets blocks expire must never reach a document. A lost epoch document would make blocks from before
a reset readable again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from tiering import CorruptBlockError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.tier import (
    BlockIO,
    BlockStore,
    Done,
    Place,
    RawBlock,
    Settlement,
    StoreProbe,
    StoreTraits,
    ThreadPool,
)
from tiers.object.bucket_options import BLOCKS, DOCUMENTS, BucketOptions
from tiers.object.cloud import Cloud
from tiers.object.clouds import make_cloud
from tiers.object.faults import CONDITION_UNKNOWN, STORE_FAILURES, http_status
from tiers.object.renewal import Renewal
from tiers.object.sender import Passed, RequestSender, Verb, start_runtime
from tiers.object.suspects import SecondNames, Suspects

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client

logger = logging.getLogger("kv_tiering.object")

_MOST_DOCUMENT_BYTES = 1 << 20

PROBE_THREADS = 32
"""Maximum number of threads for probes, besides the threads that call :meth:`ObjectStore.probe`."""

LOOKS_AFTER_REFUSAL = 12
"""Number of puts after a refused one that look first, although their places are expected to be empty.

A refused put costs as much as 12 HEADs, and has sent its whole body. Where one was refused, another machine stores the
same prompt, and is likely to have stored its next blocks too.
"""

_LIST_CHUNK = 1000
_MAX_ABSENT = 1 << 16
_LAST = "~"
"""Sorts behind every name that this store uses."""


class DocumentVersion(NamedTuple):
    """A document as one read found it, for a write that must replace exactly this version."""

    content: bytes
    version: str
    """Text that identifies the version for the service."""
    modified: float
    """Time of the last write by the service's clock, in seconds since 1970."""


class ObjectStore(BlockStore):
    """Blocks in a bucket. Several threads may call it at once.

    A put is one request (two with ``check_existing``) and therefore atomic. With ``check_existing`` or
    ``conditional_put`` an existing object is not replaced: its name contains the namespace and the key, so it holds the
    same block. A get checks the length before it copies; the frame's checksum verifies the content. Each call makes one
    attempt; a layer above retries.

    Args:
        options: the tier's options.
        cloud: the back end; default: that of the options.
    """

    traits = StoreTraits(medium="OBJECT", variable_size=True)

    def __init__(self, options: BucketOptions, cloud: Cloud | None = None) -> None:
        start_runtime()
        self._options = options
        self._cloud = make_cloud(options) if cloud is None else cloud
        self._translate, self._translated = self._cloud.dialect.translate, self._cloud.dialect.translated
        self._blocks = f"{options.prefix}{BLOCKS}"
        self._documents = f"{options.prefix}{DOCUMENTS}"
        self._probers = ThreadPool("object-probe", PROBE_THREADS)
        self.requests = RequestSender(self._cloud)
        """The requests sent so far. The service charges for each."""
        self._lifecycle_checked = False
        self._renewal: Renewal | None = None
        self._absent: dict[Place, None] = {}
        """Places that hold no block as far as is known, so that a put need not look."""
        self._looks_left = 0
        """Number of further puts that look first; threads that change it at once cost a request."""
        self._second_names = SecondNames()
        self._suspects = Suspects(self, self._delete_version)

    def __repr__(self) -> str:
        return f"ObjectStore({self._options.location})"

    def open(self) -> None:
        """Look up credentials and send the bucket one cheap request.

        Raises:
            StoreError: the bucket cannot be used. The message has the remedy.
        """
        self.close()
        self._cloud.prepare()
        client = self._cloud.connect()
        with self._translated(f"list {self._options.location}"):
            self.requests.count(Verb.LIST)
            for _ in obstore.list(client, self._blocks.rstrip("/"), offset=f"{self._blocks}{_LAST}", chunk_size=1):
                break
        self.requests.use(client)
        self._probers = ThreadPool("object-probe", PROBE_THREADS)
        age = self._options.renewal_age
        if age is not None:
            self._renewal = Renewal(age, self._modified, self._renew)
        self._check_lifecycle()

    def close(self) -> None:
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.stop()
        self.requests.use(None)
        self._probers.stop()
        self._cloud.close()

    def put_one(self, block: BlockIO) -> None:
        name = self._name(block.place)
        if self._options.check_existing and self._has_to_look(block.place):
            if self._head(name) is not None:
                self._looks_left = LOOKS_AFTER_REFUSAL
                return
            self._looks_left = max(self._looks_left - 1, 0)
        # Two buffers, one request: neither this module nor obstore copies the row.
        parts = (block.header, block.payload)
        mode: Literal["create", "overwrite"] = "create" if self._options.conditional_put else "overwrite"

        def put(client: Client) -> None:
            obstore.put(client, name, parts, use_multipart=False, mode=mode)

        try:
            self.requests.do(Verb.PUT, put, f"put {name}", size=sum(map(len, parts)), passed=(AlreadyExistsError,))
        except AlreadyExistsError as error:
            self._looks_left = LOOKS_AFTER_REFUSAL
            if not self._cloud.dialect.is_present(error) and self._head(name) is None:
                raise self._translate(error, f"put {name}") from error

    def get_one(self, block: BlockIO) -> Done:
        name, header_bytes = self._name(block.place), len(block.header)
        longest = header_bytes + len(block.payload)

        def fetch(client: Client) -> tuple[ObjectMeta, NDArray[np.uint8]]:
            result = obstore.get(client, name)
            length = result.meta["size"]
            if not header_bytes <= length <= longest:
                raise CorruptBlockError(f"object {name} has {length} bytes, not {header_bytes} to {longest}")
            return result.meta, np.frombuffer(memoryview(result.bytes()), np.uint8)

        found = self.requests.find(Verb.GET, fetch, f"get {name}")
        if found is None:
            return Done.ABSENT
        meta, body = found
        renewal = self._renewal
        if renewal is not None:
            renewal.saw(name, meta["last_modified"].timestamp())
        if len(body) != meta["size"]:
            raise CorruptBlockError(f"object {name} was announced with {meta['size']} bytes and had {len(body)}")
        np.copyto(np.frombuffer(block.header, np.uint8), body[:header_bytes])
        block.filled = len(body) - header_bytes
        np.copyto(np.frombuffer(block.payload, np.uint8)[: block.filled], body[header_bytes:])
        return Done.DONE

    def delete(self, places: Sequence[Place]) -> None:
        self.delete_objects([self._name(place) for place in places])

    def read_again(self, place: Place, limit: int) -> RawBlock | None:
        return self.requests.look_again(self._name(place), limit)

    def settle(self, place: Place, found: RawBlock) -> Settlement:
        """Delete a corrupt object if other machines or a digest allow, or use a second name for its block."""
        settlement = Settlement.LEFT
        if self._options.admission != "none":
            try:
                settlement = self._suspects.settle(self._name(place), found)
            except PermanentStoreError as error:
                logger.warning("a corrupt object cannot be deleted, and its block gets a second name: %s", error)
        if settlement is Settlement.LEFT and self._second_names.add(place):
            return Settlement.RENEWED
        return settlement

    def delete_version(self, place: Place, version: str) -> bool:
        """Delete an object by a conditional request.

        A comparison comes first, for services that ignore the condition.
        """
        return self._delete_version(self._name(place), version)

    def probe(self, places: Sequence[Place]) -> StoreProbe:
        """Probe several places at once: the first on this thread, the others on threads for probes."""
        names = [self._name(place) for place in places]
        answers: list[bool | None] = [None] * len(names)
        ended: SimpleQueue[int | None] = SimpleQueue()
        """None for each place that was probed, and the position of each one that no thread probes."""

        def look(at: int) -> None:
            try:
                answers[at] = self._head(names[at]) is not None
            except StoreError as error:
                logger.debug("%s", error)
            finally:
                ended.put(None)

        def refused(at: int, error: StoreError) -> None:
            ended.put(at)

        for at in range(1, len(names)):
            self._probers.run(partial(look, at), partial(refused, at))
        if names:
            look(0)
        left = len(names)
        while left:
            at_hand = ended.get()
            if at_hand is None:
                left -= 1
            else:
                look(at_hand)
        return StoreProbe(tuple(answers))

    def read_document(self, name: str) -> bytes | None:
        found = self.read_version(name)
        return None if found is None else found.content

    def prove_damage(self, name: str, content: bytes) -> None:
        found = self.requests.look_again(f"{self._documents}{name}", _MOST_DOCUMENT_BYTES)
        if found is None or found.content != content:
            raise TemporaryStoreError(f"document {name} reads differently each time; suspect a proxy")
        if not found.proven:
            raise TemporaryStoreError(
                f"document {name} reads damaged, and no digest of the service proves it; if all machines read it so, "
                "run kv-tiering epoch new --all --yes"
            )

    def write_document(self, name: str, data: bytes) -> None:
        self._put_document(name, data, "overwrite")

    def create_document(self, name: str, data: bytes) -> bytes | None:
        if not self._options.conditional_put:
            # The service cannot order the writers: machines that start together may get different answers.
            return super().create_document(name, data)
        # Some services ignore the condition of a put. This read leaves only concurrent writers to disagree there.
        found = self.read_document(name)
        if found is not None:
            return found
        try:
            self._put_document(name, data, "create", (AlreadyExistsError,))
        except AlreadyExistsError as error:
            fault = self._cloud.dialect.diagnose(error)
            logger.debug("document %s is being created by another process: %s", name, fault)
        return self.read_document(name)

    def _put_document(self, name: str, data: bytes, mode: Literal["create", "overwrite"], passed: Passed = ()) -> None:
        def put(client: Client) -> None:
            obstore.put(client, f"{self._documents}{name}", data, use_multipart=False, mode=mode)

        self.requests.do(Verb.PUT, put, f"put document {name}", passed=passed)

    def read_version(self, name: str) -> DocumentVersion | None:
        """Return a document with its version; None if there is none.

        Raises:
            StoreError: the document cannot be read.
        """
        path = f"{self._documents}{name}"

        def fetch(client: Client) -> DocumentVersion:
            found = obstore.get(client, path)
            meta = found.meta
            # What is longer than any document is as good as damaged, and is not downloaded.
            content = found.bytes().to_bytes() if meta["size"] <= _MOST_DOCUMENT_BYTES else b""
            return DocumentVersion(content, self._cloud.version(meta), meta["last_modified"].timestamp())

        return self.requests.find(Verb.GET, fetch, f"get document {name}")

    def remove_version(self, name: str, version: str) -> bool:
        """Remove a document if it is still the given version, and return True if it was removed.

        Raises:
            StoreError: the document cannot be removed.
        """
        return self._delete_version(f"{self._documents}{name}", version)

    def list_documents(self, prefix: str) -> Iterable[str]:
        return [name for name in self.document_times() if name.startswith(prefix)]

    def remove_document(self, name: str) -> None:
        self.remove_documents([name])

    def remove_documents(self, names: Sequence[str]) -> None:
        """Remove several documents, ignoring absent ones.

        Raises:
            StoreError: a document cannot be removed.
        """
        self.delete_objects([f"{self._documents}{name}" for name in names])

    def document_times(self) -> Mapping[str, float]:
        """Return the service's time of the last write of each document, by name.

        Raises:
            StoreError: the documents cannot be listed.
        """
        return {
            item["path"].removeprefix(self._documents): item["last_modified"].timestamp()
            for objects in self._list(self._documents.rstrip("/"))
            for item in objects
        }

    def list_places(self, place_prefix: str) -> Iterator[Sequence[Place]]:
        """Yield the places of the blocks below ``place_prefix``, up to 1,000 at a time.

        Raises:
            StoreError: the bucket cannot be listed.
        """
        start = f"{self._blocks}{place_prefix}"
        # obstore lists below whole path segments only; the filter handles a prefix that ends within a segment.
        for objects in self._list(start.rpartition("/")[0]):
            names = [item["path"] for item in objects if item["path"].startswith(start)]
            if names:
                yield [name.removeprefix(self._blocks) for name in names]

    def expect_absent(self, places: Sequence[Place]) -> None:
        """Let the next put of each of these places go without the look of ``check_existing``.

        It has no effect without ``conditional_put``, by which the service refuses to replace an object. Any thread may
        call: other threads take places out meanwhile, so the dictionary is never walked through.
        """
        if self._options.conditional_put:
            if len(self._absent) >= _MAX_ABSENT:
                self._absent.clear()  # The puts of these places look again.
            self._absent.update(dict.fromkeys(places))

    def delete_objects(self, names: Sequence[str]) -> None:
        """Delete objects by their names in the bucket.

        Raises:
            StoreError: objects cannot be deleted.
        """
        for start in range(0, len(names), self._cloud.bulk):
            self._delete_batch(list(names[start : start + self._cloud.bulk]))

    def _check_lifecycle(self) -> None:
        """Warn once if ``ttl`` is not enforced by the bucket. Blocks that stay too long are no outage."""
        if self._options.ttl is None or self._lifecycle_checked:
            return
        problem = self._cloud.check_lifecycle(self._blocks, self._documents)
        self._lifecycle_checked = True
        if problem is not None:
            logger.warning("%s: %s", self._options.location, problem)

    def note_use(self, places: Iterable[Place]) -> None:
        """Note that blocks are in use, heads first, so that old ones are renewed. Returns at once."""
        renewal = self._renewal
        if renewal is not None:
            renewal.use(map(self._name, places))

    def _modified(self, name: str) -> float | None:
        meta = self._head(name)
        return None if meta is None else meta["last_modified"].timestamp()

    def _renew(self, name: str) -> None:
        self.requests.find(Verb.PUT, lambda client: self._cloud.renew(client, name), f"copy {name}")

    def _name(self, place: Place) -> str:
        return f"{self._blocks}{place}{self._second_names.suffix(place)}"

    def _has_to_look(self, place: Place) -> bool:
        """Return True if a put of ``place`` looks first, for lack of knowledge or after a refused put.

        A place that is expected to hold no block counts once: a retry looks.
        """
        return self._absent.pop(place, False) is False or self._looks_left > 0

    def _head(self, name: str) -> ObjectMeta | None:
        return self.requests.find(Verb.HEAD, lambda client: obstore.head(client, name), f"head {name}")

    def _list(self, directory: str) -> Iterator[Sequence[ObjectMeta]]:
        """Yield the objects below ``directory``, up to 1,000 at a time."""
        with self._translated(f"list {directory}"):
            self.requests.count(Verb.LIST)
            for page, objects in enumerate(obstore.list(self.requests.client, directory, chunk_size=_LIST_CHUNK)):
                if page:
                    self.requests.count(Verb.LIST)
                yield objects

    def _delete_version(self, name: str, version: str) -> bool:
        send, gone = self.requests.send, (FileNotFoundError, PreconditionError, AlreadyExistsError)
        with self._translated(f"delete {name}"), contextlib.suppress(*gone):
            if self._cloud.version(send(Verb.HEAD, lambda client: obstore.head(client, name))) != version:
                return False
            conditional = self._cloud.deleter(name, version)
            try:
                send(Verb.DELETE, lambda client: obstore.delete(client, name), through=conditional)
            except STORE_FAILURES as error:
                if http_status(error) not in CONDITION_UNKNOWN:
                    raise
                send(Verb.DELETE, lambda client: obstore.delete(client, [name]))
            return True
        return False

    def _delete_batch(self, names: list[str]) -> None:
        try:
            self.requests.send(Verb.DELETE, lambda client: obstore.delete(client, names))
            self.requests.count(Verb.DELETE, -(-len(names) // self._cloud.per_request) - 1)
        except FileNotFoundError:
            # Some services answer 404 for an absent object, which ends a batch early: delete one by one.
            if len(names) > 1:
                for name in names:
                    self._delete_batch([name])
        except STORE_FAILURES as error:
            raise self._translate(error, f"delete {len(names)} object(s)") from error
