"""The namespaces and epochs of a medium, as its documents tell them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from tiering.admin.records import EpochState, KnownNamespace
from tiering.api.namespace import fingerprint_of
from tiering.epochs.documents import EPOCHS, LEASES, PARAMETERS, EpochDocument, parse_parameters

_EPOCH = re.compile(rf"{EPOCHS}([0-9a-f]{{32}})(?:-([0-9]+))?")
_PARAMETERS = re.compile(rf"{PARAMETERS}([0-9a-f]{{32}})\.json")
_LEASE = re.compile(rf"{LEASES}([0-9a-f]{{32}})-([0-9a-f]{{32}})")
_HOLDER = re.compile(rb"(process \d{1,10} on [!-~]{1,64})\n")


def namespace_of(document: str) -> str | None:
    """Return the namespace that the name of a document holds, as 32 hex digits; None for other names."""
    for pattern in (_PARAMETERS, _EPOCH, _LEASE):
        if match := pattern.fullmatch(document):
            return match[1]
    return None


def known_namespaces(documents: Mapping[str, bytes], fresh_leases: Collection[str]) -> list[KnownNamespace]:
    """Return the namespaces that documents name, sorted by their names.

    The valid epoch document with the highest number names the common epoch. The epoch that a process began for itself
    by a reset is abandoned, unless a lease names it.

    Args:
        documents: content of the documents of the medium, by name; without that of a lease, its holder is not known.
        fresh_leases: names of the leases that are young enough.
    """
    parameters: dict[str, Mapping[str, Any]] = {}
    epochs: dict[str, dict[str, EpochState]] = {}
    newest: dict[str, int] = {}
    holders: dict[str, dict[str, str]] = {}
    for name, content in documents.items():
        if match := _PARAMETERS.fullmatch(name):
            parameters[match[1]] = parse_parameters(content) or {}
        elif match := _EPOCH.fullmatch(name):
            number = int(match[2] or 0)
            document = EpochDocument.parse(content)
            if document is None or document.base.hex() != match[1]:
                continue
            states = epochs.setdefault(match[1], {})
            fingerprint = fingerprint_of(document.base, document.epoch).hex()
            states[fingerprint] = EpochState.ABANDONED
            if not document.private and number >= newest.get(match[1], 0):
                newest[match[1]] = number
                states.update(dict.fromkeys(states, EpochState.ABANDONED))
                states[fingerprint] = EpochState.CURRENT
    for name in fresh_leases:
        if match := _LEASE.fullmatch(name):
            epochs.setdefault(match[1], {}).setdefault(match[2], EpochState.LEASED)
            holders.setdefault(match[1], {})[match[2]] = _holder(documents.get(name, b""))
    return [
        KnownNamespace(name, parameters.get(name, {}), epochs.get(name, {}), holders.get(name, {}))
        for name in sorted(parameters.keys() | epochs.keys())
    ]


def _holder(content: bytes) -> str:
    """Return the text of a lease; empty if it is none that an engine has written."""
    match = _HOLDER.fullmatch(content)
    return "" if match is None else match[1].decode()
