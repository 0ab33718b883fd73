"""The greeting of an engine, and the state of the weights that blocks were computed with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from tiering.machine.messages import MAX_TEXT, MessageError
from tiering.secondary.contract import TierContext

START = "start"
"""State of weights that the namespace identifies."""

UNKNOWN_EPOCH = "?"
"""Epoch while a shared medium is not open yet."""

_REVISION, _PRIVATE = "revision:", "private:"
_LONGEST = 1000


def revision_weights(revision: str) -> str:
    """Return the state of weights with the name ``revision``, at the start or after a reset."""
    return f"{_REVISION}{revision}"


def private_weights(name: str) -> str:
    """Return the state of weights after a reset without a revision; ``name`` is random."""
    return f"{_PRIVATE}{name}"


def revision_of(weights: str) -> str | None:
    """Return the revision of a state of weights; None if it has none."""
    return weights.removeprefix(_REVISION) if weights.startswith(_REVISION) else None


def checked_weights(text: bytes) -> str:
    """Return the state of weights that a message has.

    Raises:
        MessageError: it is none.
    """
    try:
        weights = text.decode()
    except UnicodeDecodeError as error:
        raise MessageError("the state of the weights is no text") from error
    if (
        len(weights) > _LONGEST
        or "\0" in weights
        or not (weights == START or weights.startswith((_REVISION, _PRIVATE)))
    ):
        raise MessageError("the state of the weights is none of a kind that this version has")
    return weights


@dataclass(frozen=True, slots=True)
class Greeting:
    """The greeting of an engine that connects."""

    tier: str
    """Name of the tier; empty for a connection that only asks for the names of the tiers."""
    parameters: str = ""
    """Parameters of the namespace."""
    group_bytes: tuple[int, ...] = ()
    """Bytes of a block, per KV-cache group."""
    rows: int = 0
    """Number of rows."""
    stride: int = 0
    """Bytes from one row to the next."""
    weights: str = START
    """State of the weights."""
    follows: bool = False
    """True if the engine gets the keys of the blocks that leave the tier."""

    @classmethod
    def about(cls, context: TierContext, rows: int, stride: int, weights: str) -> Self:
        """Return the greeting of a tier of an engine.

        Args:
            context: environment of the tier.
            rows: number of rows.
            stride: bytes from one row to the next.
            weights: state of the weights.
        """
        parameters, follows = context.namespace.parameters, context.enable_events
        return cls(context.name, parameters, context.group_bytes, rows, stride, weights, follows)

    def text(self) -> bytes:
        """Return the greeting as the text of a record."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, text: bytes, page: int) -> Self:
        """Return the greeting in the text of a record.

        Args:
            text: the text.
            page: size of a page in bytes.

        Raises:
            MessageError: it is none, or a number is beyond a bound.
        """
        try:
            words = json.loads(text)
            words["group_bytes"] = tuple(words["group_bytes"])
            found = cls(**words)
            numbers = (found.rows, found.stride, *found.group_bytes)
            texts = (found.tier, found.parameters, found.weights)
            if not all(type(word) is int and 0 <= word < 1 << 40 for word in numbers):
                raise MessageError("a number of the greeting is beyond its bounds")
            if not all(type(word) is str for word in texts) or type(found.follows) is not bool or len(text) > MAX_TEXT:
                raise MessageError("a word of the greeting has the wrong type")
            found.parameters.encode()  # JSON also has characters that are no text
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MessageError(f"the greeting cannot be read: {error}") from error
        checked_weights(found.weights.encode(errors="surrogatepass"))
        if found.tier and not (
            found.rows
            and found.stride
            and found.stride % page == 0
            and 0 < len(found.group_bytes) <= 256
            and min(found.group_bytes) > 0
            and max(found.group_bytes) <= found.stride
        ):
            raise MessageError("the rows of the greeting do not hold the blocks")
        return found


@dataclass(frozen=True, slots=True)
class State:
    """State of a tier of the service, beside its generation and flags."""

    weights: str
    """State of the weights that the tier's blocks were computed with."""
    epoch: str
    """Common epochs of the shared media: empty without any, :data:`UNKNOWN_EPOCH` until all are open."""
    window: int
    """Largest number of blocks of stores that the engine may have in flight."""
    stats: Mapping[str, object]
    """Statistics of the tier, of all engines together."""

    def text(self) -> bytes:
        """Return the state as the text of a record."""
        return "\0".join((self.weights, self.epoch, str(self.window), json.dumps(self.stats))).encode()


def read_state(text: bytes) -> tuple[str, str, int, bytes]:
    """Return weights, epoch, window and statistics of a state; the statistics are not read yet.

    Raises:
        MessageError: the text is no state.
    """
    words = text.split(b"\0", 3)
    try:
        weights, epoch, window, stats = words
        return weights.decode(), epoch.decode(), int(window), stats
    except ValueError as error:
        raise MessageError(f"a state cannot be read: {error}") from error
