"""Explanation of a cold start: the parameters in which a new namespace differs from the nearest one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from tiering.errors import StoreError
from tiering.medium.block_store import BlockStore
from tiering.runtime.json_text import parse_json

logger = logging.getLogger("kv_tiering.tier")

_MAX_NAMESPACES = 64
"""Maximum number of the medium's namespaces that are compared."""
_MAX_TOLD = 8
"""Maximum number of differences in the log line."""
_MAX_VALUE = 80
"""Maximum length of a value in the log line, in characters."""
_UNTOLD = frozenset({"salt"})
"""Parameters whose values are not logged."""


def log_nearest(tier: str, store: BlockStore, parameters: str, prefix: str) -> str:
    """Log the parameters in which the nearest of the other namespaces differs, and return them.

    Documents that cannot be read are left out.

    Args:
        tier: name of the tier.
        store: the medium.
        parameters: parameters of the new namespace, as in its own document.
        prefix: prefix of the names of such documents.

    Returns:
        The parameters as a text; empty if there is no other namespace.
    """
    try:
        names, beside = sorted(store.list_documents(prefix)), store.documents_beside(prefix)
    except StoreError as error:
        logger.info("tier %s: the namespaces that its medium knows cannot be listed: %s", tier, error)
        return ""
    own = _leaves(parse_json(parameters))
    readers = [(name, partial(store.read_document, name)) for name in names] + list(beside.items())
    others = [
        (found, name)
        for name, read in readers[:_MAX_NAMESPACES]
        if (known := _read(name, read)) is not None and (found := tuple(_differences(own, known)))
    ]
    if not others:
        return ""
    differences, nearest = min(others, key=lambda other: (len(other[0]), other[1]))
    told = list(differences[:_MAX_TOLD])
    if len(differences) > _MAX_TOLD:
        told.append(f"and {len(differences) - _MAX_TOLD} more")
    logger.warning(
        "tier %s: begins empty, because nothing was stored with these parameters before; "
        "of %d other namespaces there, the nearest (%s) differs in %s",
        tier,
        len(others),
        nearest,
        "; ".join(told),
    )
    return "; ".join(told)


def differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the parameters in which two namespaces differ, with their values but those that are secret.

    Args:
        own: parameters of a namespace, as in its document.
        other: those of another one, which is "there" in the texts.
    """
    return list(_differences(_leaves(own), _leaves(other)))


def _read(name: str, read: Callable[[], bytes | None]) -> dict[str, Any] | None:
    try:
        stored = read()
        found = None if stored is None else parse_json(bytes(stored))
        return _leaves(found) if isinstance(found, Mapping) else None
    except (StoreError, ValueError, RecursionError) as error:
        logger.info("document %s cannot be read, and is not compared: %s", name, error)
        return None


def _leaves(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the parameters by the path of their words; a list is one value."""
    leaves: dict[str, Any] = {}
    for word, item in value.items():
        path = f"{above}{word}"
        leaves.update(_leaves(item, f"{path}.") if isinstance(item, Mapping) else {path: item})
    return leaves


def _differences(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for path in sorted(own.keys() | other.keys()):
        if path in own and path in other and own[path] == other[path]:
            continue
        if path in _UNTOLD:
            yield path
        else:
            yield f"{path} ({_short(other, path)} there, {_short(own, path)} here)"


def _short(leaves: Mapping[str, Any], path: str) -> str:
    if path not in leaves:
        return "nothing"
    text = json.dumps(leaves[path])
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
