"""The thread of an explainer, and the UNIX socket on which it answers.

The socket is a file that only its owner may use, in a directory that only its owner may use. A question and its answer
are one line of JSON each. No answer has tokens or hashes.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from tiering.api.masking import shown_name
from tiering.errors import ConfigError, TemporaryStoreError
from tiering.explain.causes import MissCause
from tiering.explain.explainer import Explainer
from tiering.explain.last_hour import MINUTES
from tiering.runtime.door import bind_socket, is_listening
from tiering.runtime.forks import inert_in_children
from tiering.runtime.pool import ThreadPool

logger = logging.getLogger("kv_tiering.explain")

PERIOD = 0.25
"""Seconds between two looks at the notes of the scheduler's thread."""

LONGEST_QUESTION = 1 << 14
"""Largest number of bytes of a question."""

LONGEST_ANSWER = 1 << 24
"""Largest number of bytes of an answer."""

_CLIENT_SECONDS = 1.0
"""Seconds for which one client may keep the thread."""

MOST_OTHERS = 16
"""Largest number of further requests with the same id that an answer names."""

_LATEST = 3
"""Number of ids that the answer about an unknown request names."""

_numbers = count(1)


def runtime_directory() -> Path:
    """Return the directory of this user's sockets; it may not exist yet."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kv-tiering" if base else Path(tempfile.gettempdir()) / f"kv-tiering-{os.getuid()}"


def sockets() -> list[Path]:
    """Return the sockets in the runtime directory of this user that a process listens on."""
    return [path for path in sorted(runtime_directory().glob("why-*.sock")) if is_listening(path, socket.SOCK_STREAM)]


def ask(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the engine that listens on a socket.

    Args:
        path: the socket.
        question: ``{"request": id}``, or ``{"top": true}`` with the number of ``minutes``, which are 60 by default.

    Raises:
        TemporaryStoreError: no engine answers there.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10 * _CLIENT_SECONDS)
        try:
            client.connect(str(path))
            client.sendall(json.dumps(question).encode() + b"\n")
            answer = json.loads(b"".join(_chunks(client, LONGEST_ANSWER, 10 * _CLIENT_SECONDS)))
        except BlockingIOError as error:
            raise TemporaryStoreError(f"{path}: too many clients wait for the engine; try again") from error
        except (OSError, ValueError) as error:
            raise TemporaryStoreError(f"{path}: no engine answers: {error}") from error
    if not isinstance(answer, dict):
        raise TemporaryStoreError(f"{path}: the answer is no mapping")
    return answer


def _chunks(peer: socket.socket, most: int, seconds: float) -> Iterator[bytes]:
    """Yield what a peer sends until the end of a line, of the connection, or of ``most`` bytes.

    Raises:
        TimeoutError: that takes longer than ``seconds``.
    """
    end = time.monotonic() + seconds
    while most > 0 and (chunk := peer.recv(min(most, 1 << 16))):
        yield chunk
        if chunk.endswith(b"\n"):
            return
        most -= len(chunk)
        if (left := end - time.monotonic()) <= 0.0:
            raise TimeoutError(f"no end of the line within {seconds:g} s")
        peer.settimeout(left)


class ExplainService:
    """The thread that processes an explainer's notes and answers questions on a socket.

    Without a thread, the explainer notes nothing; without a socket, only its counters and log lines are left. Both are
    logged once.

    Args:
        explainer: the explainer.
        path: the socket; None: a new one in the runtime directory.
        cold_starts: returns tier → what differs, of the tiers that have begun empty beside blocks of others; default:
            there are none.
    """

    def __init__(
        self, explainer: Explainer, path: Path | None, cold_starts: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        self._explainer = explainer
        self._cold_starts = cold_starts
        self._stopped = threading.Event()
        self._server = self._listen(path)
        self._threads = ThreadPool("kv-tiering-why", 1)
        self._threads.run(self._serve, self._unstarted)
        inert_in_children(self, ("stop",))

    def stop(self, timeout: float) -> None:
        """End the thread and remove the socket; a second call does nothing.

        Args:
            timeout: longest wait for the thread in seconds.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        self._threads.stop()
        if self._server is not None:
            with suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # ends the wait for a client
        self._threads.join(timeout)
        self._close()

    def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            with suppress(OSError):
                Path(self.path).unlink()
            server.close()

    def _listen(self, path: Path | None) -> socket.socket | None:
        self.path = path or runtime_directory() / f"why-{os.getpid()}-{next(_numbers)}.sock"
        """The socket's file."""
        try:
            server = bind_socket(self.path, socket.SOCK_STREAM, others=0o077 if path is None else 0)
        except (OSError, ConfigError) as error:
            logger.warning("explain: no socket for kv-tiering why (explain.socket names one): %s", error)
            return None
        server.settimeout(PERIOD)
        logger.info("explain: ask with kv-tiering why REQUEST --socket %s", self.path)
        return server

    def _unstarted(self, error: BaseException) -> None:
        self._explainer.disable()
        self._close()
        logger.warning("explain: no thread can be started, so no misses are explained: %s", error)

    def _serve(self) -> None:
        try:
            self._follow()
        except BaseException:
            self._explainer.disable()  # the notes would only take room
            self._close()
            logger.warning("explain: the thread has failed, so no more misses are explained")
            raise  # the pool logs it

    def _follow(self) -> None:
        while not self._stopped.is_set():
            server = self._server
            client = None
            if server is None:
                self._stopped.wait(PERIOD)
            else:
                with suppress(TimeoutError):
                    try:
                        client, _ = server.accept()
                    except TimeoutError:
                        raise
                    except OSError as error:
                        if not self._stopped.is_set():
                            logger.warning("explain: the socket failed, so no more questions are answered: %s", error)
                            self._close()
            self._explainer.settle()
            if client is not None:
                with client, suppress(OSError):
                    self._answer(client)
        self._explainer.settle()

    def _answer(self, client: socket.socket) -> None:
        client.settimeout(_CLIENT_SECONDS)
        try:
            question = json.loads(b"".join(_chunks(client, LONGEST_QUESTION, _CLIENT_SECONDS)))
        except (ValueError, RecursionError):
            question = None
        answer = answer_to(self._explainer, question)
        if "error" not in answer:
            answer["cold_starts"] = self._cold_starts()
        client.sendall(json.dumps(answer).encode() + b"\n")


def answer_to(explainer: Explainer, question: object) -> dict[str, Any]:
    """Return the answer to a question, as plain data; it has the key ``error`` if there is none.

    Args:
        explainer: the explainer.
        question: the question, as a client has sent it.
    """
    if isinstance(question, dict) and question.get("top") is True:
        minutes = question.get("minutes", MINUTES)
        if type(minutes) is not int or not 1 <= minutes <= MINUTES:
            return {"error": f"minutes must be a whole number from 1 to {MINUTES}"}
        last = explainer.last(minutes)
        causes = [
            {"cause": cause.word, "tier": tier, "tokens": tokens}
            | ({"reason": reason.word} if reason else {})
            | ({"factors": factors} if cause is MissCause.EVICTED and (factors := last.multiples(tier)) else {})
            for (cause, tier, reason), tokens in last.causes.most_common()
        ]
        return {
            "minutes": minutes,
            "prompt_tokens": last.prompt,
            "causes": causes,
            "requests": explainer.requests,
            "followed_seconds": explainer.followed_seconds,
        }
    name = question.get("request") if isinstance(question, dict) else None
    if not isinstance(name, str):
        return {"error": 'the question is neither {"request": "ID"} nor {"top": true}'}
    found = explainer.answer(name)
    if found is not None:
        others = explainer.names(name)[1 : MOST_OTHERS + 1]
        return found.as_dict() | ({"others": others} if others else {})
    if explainer.is_waiting(name):
        return {"error": f"request {shown_name(name)} has not begun to compute"}
    unknown = f"request {shown_name(name)} is unknown"
    if not (latest := explainer.latest(_LATEST)):
        return {"error": f"{unknown}: no request has begun to compute"}
    names = ", ".join(map(shown_name, latest))
    return {"error": f"{unknown}, or is not among the last {explainer.requests} requests; the latest: {names}"}
