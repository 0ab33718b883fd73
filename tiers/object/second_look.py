"""The second look at a refused object, which separates damaged objects from a damaging path."""

from __future__ import annotations

import hashlib

import obstore

from tiering import TemporaryStoreError
from tiering.tier import RawBlock
from tiers.object.cloud import Cloud
from tiers.object.faults import STORE_FAILURES
from tiers.object.sender import RequestSender
from tiers.object.verbs import Verb


def second_look(cloud: Cloud, requests: RequestSender, name: str, limit: int) -> RawBlock | None:
    """Read an object over new connections, and compare the answer with the service's statements.

    It takes a HEAD and a GET.

    Args:
        cloud: the back end.
        requests: sends and counts the requests.
        name: name of the object.
        limit: longest content to return, in bytes.

    Returns:
        The object; None if there is none.

    Raises:
        TemporaryStoreError: length, version or digest differ from what the service states. The path is suspect then (a
            proxy, or this machine's memory), and not the object.
        StoreError: the object could not be read.
    """
    try:
        # A client of its own has connections of its own.
        fresh = cloud.connect()
        stated = requests.send(Verb.HEAD, lambda client: obstore.head(client, name), through=fresh)
        result = requests.send(Verb.GET, lambda client: obstore.get(client, name), through=fresh)
        size, version, expected = result.meta["size"], cloud.version(result.meta), cloud.digest(result.meta)
        content = result.bytes().to_bytes() if size <= limit else b""
    except FileNotFoundError:
        return None
    except STORE_FAILURES as error:
        raise cloud.dialect.translate(error, f"get {name} again") from error
    received = len(content) if size <= limit else size
    if not stated["size"] == size == received:
        raise _suspect_path(f"{received} bytes arrived of an object of {stated['size']}", name)
    if cloud.version(stated) != version:
        raise _suspect_path("a HEAD and a GET were answered with different versions", name)
    if size > limit or expected is None:
        return RawBlock(content, size, version)
    if expected != hashlib.md5(content, usedforsecurity=False).hexdigest():
        raise _suspect_path("the bytes differ from their ETag", name)
    return RawBlock(content, size, version, proven=True)


def _suspect_path(problem: str, name: str) -> TemporaryStoreError:
    return TemporaryStoreError(f"{problem}; suspect a proxy or this machine's memory (get {name} again)")
