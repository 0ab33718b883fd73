"""The fill of a directory from the medium, so that its denials can be trusted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from tiering import StoreError
from tiering.tier import Place, ThreadPool
from tiers.coordination.directory import Directory, digests_of
from tiers.valkey.client import ValkeyClient

logger = logging.getLogger("kv_tiering.coordination")

_BATCH = 128
"""Maximum number of blocks in one command; the server runs one command at a time."""


class Filling:
    """Fills one directory at a time.

    Blocks that are stored meanwhile are added by the machines that store them.

    Args:
        name: name of the tier.
        listing: lists the places of all blocks below a prefix, in batches; blocks, and raises StoreError.
        client: connections to the server.
        threads: pool with a thread for the fill.
    """

    def __init__(
        self,
        name: str,
        listing: Callable[[str], Iterator[Sequence[Place]]],
        client: ValkeyClient,
        threads: ThreadPool,
    ) -> None:
        self._name = name
        self._listing = listing
        self._client = client
        self._threads = threads
        self._running = False
        self._stop = threading.Event()

    @property
    def running(self) -> bool:
        """True while a directory is being filled."""
        return self._running

    def stop(self) -> None:
        """End the fill soon; the directory stays incomplete."""
        self._stop.set()

    def start(self, directory: Directory, refused: Callable[[], object]) -> None:
        """Begin to fill ``directory``.

        Args:
            directory: the directory.
            refused: called instead, by any thread, if no thread can be started, or one runs.
        """

        def unstarted(error: StoreError) -> None:
            self._running = False
            logger.warning("tier %s: the fleet's directory cannot be filled: %s", self._name, error)
            refused()

        if self.running or self._stop.is_set():
            refused()
            return
        self._running = True
        self._threads.run(partial(self._fill, directory), unstarted)

    def _fill(self, directory: Directory) -> None:
        try:
            generation, count = directory.fill(b""), 0
            for places in self._listing(directory.place_prefix):
                for at in range(0, len(places), _BATCH):
                    digests = digests_of(places[at : at + _BATCH])
                    if self._stop.is_set() or directory.fill(digests) != generation:
                        return
                count += len(places)
            if directory.finish(generation):
                logger.info("tier %s: the fleet's directory is complete: %d blocks", self._name, count)
        except StoreError as error:
            logger.warning(
                "tier %s: the fleet's directory could not be filled, so that lookups go on asking the bucket: %s",
                self._name,
                error,
            )
        finally:
            self._running = False
