"""Random walks of engines over two media with new epochs, outages, losses, older copies and restarts.

The bytes of a block tell its key, and how many new epochs had been begun when it was computed. An engine that knows of
an epoch must never load a block that was computed before. An engine that can read a record of an epoch, on a medium or
on its disk, must know of it: at its start, or after its next look.
"""

from __future__ import annotations

import random
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import valkey

from examples.valkey_server import ValkeyServer, serving
from tests.epochs.common import find_common
from tests.fake_s3 import FakeS3, fake_s3
from tests.integration.epoch_machine import BLOCK_BYTES, MODEL, QUICK, Machine, bucket_tier, disk_tier
from tiering.api.namespace import Namespace
from tiering.block_tier.epoch_chores import LOOK_SECONDS
from tiering.epochs.documents import EpochDocument, epoch_document, new_invalidation
from tiering.epochs.driver import SURE_SECONDS, begin_common
from tiering.errors import StoreError
from tiering.medium.block_store import BlockStore
from tiering.secondary.agreement import EpochAgreement
from tiering.testing.clock import until
from tiering.testing.keys import keys_of
from tiers.object.bucket_options import S3Options
from tiers.object.store import ObjectStore
from tiers.valkey.tier import ValkeyOptions, ValkeyStore

K = keys_of(*range(8))
SETTLE_SECONDS = 300.0
"""Longest wait for agreement, which took 76 rounds of requests and 4 s at a load of 10."""

NAMESPACE = Namespace.build(MODEL, (BLOCK_BYTES,))
DOCUMENT = epoch_document(NAMESPACE)


class Medium(ABC):
    """A shared medium that a walk breaks, empties, and takes back to older copies."""

    up = True
    """False during an outage."""
    tier: dict[str, Any]
    """The medium as a tier of a stack."""
    admin: BlockStore
    """The medium as an operator uses it."""

    @abstractmethod
    def stop(self) -> None:
        """Begin an outage."""

    @abstractmethod
    def start(self) -> None:
        """End an outage."""

    @abstractmethod
    def copy(self) -> object:
        """Return a copy of the whole content."""

    @abstractmethod
    def restore(self, content: Any) -> None:
        """Replace the whole content; the medium runs."""

    @abstractmethod
    def flush(self) -> None:
        """Remove the whole content; the medium runs."""

    def marks(self) -> set[bytes]:
        """Return the invalidations that the documents name."""
        return set(find_common(self.admin, NAMESPACE).invalidations)


class Bucket(Medium):
    """A bucket on a fake server."""

    def __init__(self, server: FakeS3, name: str) -> None:
        self.server = server
        self.tier = bucket_tier(server, name=name)
        self.admin = ObjectStore(
            S3Options.model_validate({"bucket": server.bucket, "endpoint_url": server.endpoint, "prefix": "prod/"})
        )
        self.admin.open()

    def stop(self) -> None:
        self.server.fail(503, times=10**9)

    def start(self) -> None:
        self.server.heal()

    def copy(self) -> dict[str, bytes]:
        with self.server.lock:
            return dict(self.server.objects)

    def restore(self, content: dict[str, bytes]) -> None:
        with self.server.lock:
            self.server.objects.clear()
            self.server.objects.update(content)

    def flush(self) -> None:
        self.restore({})


class Pool(Medium):
    """A real Valkey server. An outage costs its content."""

    def __init__(self, server: ValkeyServer, name: str) -> None:
        self.server = server
        self.tier = {"type": "valkey", "name": name, "url": server.url, **QUICK}
        self.admin = ValkeyStore(ValkeyOptions(url=server.url))
        self._raw = valkey.Valkey(port=server.port, retry=None)

    def stop(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.restart()
        self._raw.close()
        self.admin.close()

    def copy(self) -> dict[bytes, bytes]:
        return {name: self._raw.dump(name) for name in self._raw.scan_iter()}

    def restore(self, content: dict[bytes, bytes]) -> None:
        self.flush()
        for name, value in content.items():
            self._raw.restore(name, 0, value, replace=True)

    def flush(self) -> None:
        self._raw.flushall()

    def close(self) -> None:
        self._raw.close()
        self.admin.close()


class Walk:
    """Three engines with different stacks over two media, and an operator.

    Args:
        seed: seed of the walk.
        path: directory for the disks.
        media: the media.
    """

    def __init__(self, seed: int, path: Path, media: Sequence[Medium]) -> None:
        self.random = random.Random(seed)
        self.media = media
        self.stacks: list[tuple[Path | None, Sequence[Medium]]] = [
            (path / "disk-0", media),
            (None, media),
            (path / "disk-2", media[1:]),
        ]
        self.engines: list[Machine | None] = [None] * len(self.stacks)
        self.begun: dict[bytes, int] = {}
        """New epochs by their identifiers, counted from 1."""
        self.copies: list[list[object]] = [[] for _ in media]
        self.disks: dict[int, list[Path]] = {}
        self.checks = 0
        self.log: list[str] = []
        self._path = path
        self._skipped = 0.0

    def clock(self) -> float:
        return time.monotonic() + self._skipped

    def act(self) -> None:
        """Take one step at random."""
        choice = self.random.choices(
            [self.use, self.start, self.end, self.begin, self.outage, self.lose, self.save, self.look, self.glance],
            [30, 8, 2, 4, 2, 3, 4, 4, 6],
        )[0]
        choice()

    # --------------------------------------------------------------------------------------------------------- engines

    def use(self) -> None:
        """Load a prefix on an engine, check every block, and compute the rest."""
        number = self.random.choice([at for at, engine in enumerate(self.engines) if engine is not None] or [0])
        engine = self.engines[number]
        if engine is None:
            return
        keys = K[: self.random.randint(1, len(K))]
        engine.manager.on_schedule_end()
        known = self.known(engine)
        found = engine.found(keys, range(len(self.begun), -1, -1))
        self.checks += len(found)
        self.log.append(f"engine {number} finds {found}, and knows of {known}")
        assert None not in found, "WRONG KV: no block of this key"
        assert all(computed is not None and computed >= known for computed in found), "WRONG KV: an older block"
        engine.weights = len(self.begun)
        engine.store(keys)

    def known(self, engine: Machine) -> int:
        """Return the last new epoch that the engine knows of."""
        return max((self.begun[mark] for mark in agreement(engine).known if mark in self.begun), default=0)

    def start(self) -> None:
        number = self.random.choice([at for at, engine in enumerate(self.engines) if engine is None] or [-1])
        if number < 0:
            return
        disk, media = self.stacks[number]
        recorded = self.recorded(disk)
        for medium in media:
            if medium.up:
                recorded |= medium.marks()
        tiers = ([] if disk is None else [disk_tier(disk)]) + [medium.tier for medium in media]
        engine = Machine(tiers, words={"open_deadline": "60s"}, clock=self.clock)
        self.engines[number] = engine
        self.log.append(f"engine {number} starts; {self.orders(recorded)} are recorded")
        assert recorded <= set(agreement(engine).known), "an engine starts that does not know of an epoch"

    def end(self) -> None:
        """End an engine, and sometimes take its disk back to an older copy."""
        number = self.random.randrange(len(self.engines))
        engine, disk = self.engines[number], self.stacks[number][0]
        if engine is None:
            return
        engine.manager.shutdown()
        self.engines[number] = None
        self.log.append(f"engine {number} ends")
        if disk is None or not disk.exists():
            return
        copies = self.disks.setdefault(number, [])
        if copies and self.random.random() < 0.3:
            shutil.rmtree(disk)
            shutil.copytree(self.random.choice(copies), disk)
            self.log.append(f"disk {number} returns to an older copy")
        elif len(copies) < 4:
            copies.append(self._path / f"copy-{number}-{len(copies)}")
            shutil.copytree(disk, copies[-1])

    def recorded(self, disk: Path | None) -> set[bytes]:
        """Return the invalidations that a disk remembers."""
        if disk is None or not (disk / "documents" / DOCUMENT).exists():
            return set()
        document = EpochDocument.parse((disk / "documents" / DOCUMENT).read_bytes())
        return set() if document is None else set(document.invalidations)

    def orders(self, marks: set[bytes]) -> list[int]:
        return sorted(self.begun.get(mark, -1) for mark in marks)

    # ----------------------------------------------------------------------------------------------------------- media

    def begin(self) -> None:
        """Begin a new epoch on the media that are up; sometimes the command dies after the first."""
        mark = new_invalidation()
        media = [medium for medium in self.random.sample(self.media, len(self.media)) if medium.up]
        for medium in media[: self.random.randint(1, len(self.media))]:
            self.begun.setdefault(mark, len(self.begun) + 1)
            self.log.append(f"epoch {self.begun[mark]} begins on {medium.tier['name']}")
            begin_common(medium.admin, NAMESPACE, mark)

    def outage(self) -> None:
        medium = self.random.choice(self.media)
        self.log.append(f"{medium.tier['name']} {'goes down' if medium.up else 'comes up'}")
        (medium.stop if medium.up else medium.start)()
        medium.up = not medium.up

    def lose(self) -> None:
        """Remove the content of a medium, or replace it with an older copy."""
        at = self.random.randrange(len(self.media))
        medium = self.media[at]
        if not medium.up:
            return
        if self.copies[at] and self.random.random() < 0.7:
            self.log.append(f"{medium.tier['name']} returns to an older copy")
            medium.restore(self.random.choice(self.copies[at]))
        else:
            self.log.append(f"{medium.tier['name']} is emptied")
            medium.flush()

    def save(self) -> None:
        """Copy the content of a medium."""
        at = self.random.randrange(len(self.media))
        if self.media[at].up:
            self.copies[at] = [*self.copies[at][-3:], self.media[at].copy()]

    # ------------------------------------------------------------------------------------------------------------ time

    def look(self) -> None:
        """Let the engines look for new epochs; if all media are up, they know of all that are recorded there."""
        self._skipped += self.random.choice([LOOK_SECONDS, LOOK_SECONDS, SURE_SECONDS + LOOK_SECONDS])
        self.log.append("time passes")
        if not all(medium.up for medium in self.media):
            for engine in self.running():
                engine.manager.on_schedule_end()
            return
        self.settle()

    def glance(self) -> None:
        """Let some tiers look, and others not yet."""
        self._skipped += 0.87 * LOOK_SECONDS
        self.log.append("some tiers look")

        def looked() -> bool:
            for engine in self.running():
                engine.manager.on_schedule_end()
                engine.manager.has_pending_work()
            watches = [tier._life._watch for engine in self.running() for tier in engine.manager.secondary_tiers]  # type: ignore[attr-defined]
            return not any(watch.running for watch in watches)

        assert until(looked)

    def running(self) -> list[Machine]:
        return [engine for engine in self.engines if engine is not None]

    def settle(self) -> None:
        """Wait until no engine and no medium knows of an epoch that the others of its stack do not know of."""

        def settled() -> bool:
            self._skipped += 0.3
            for engine in self.running():
                engine.manager.on_schedule_end()
                engine.manager.has_pending_work()
            return all(self.agreed(*pair) for pair in zip(self.engines, self.stacks, strict=True))

        if not until(settled, SETTLE_SECONDS):
            lines = [
                self.state(engine, stack) for engine, stack in zip(self.engines, self.stacks, strict=True) if engine
            ]
            raise AssertionError("\n".join(["the engines and media do not agree", *lines]))

    def agreed(self, engine: Machine | None, stack: tuple[Path | None, Sequence[Medium]]) -> bool:
        if engine is None:
            return True
        known = set(agreement(engine).known)
        try:
            return all(medium.marks() == known for medium in stack[1]) and all(
                engine.available(tier.name) for tier in engine.manager.secondary_tiers
            )
        except StoreError:
            return False

    def state(self, engine: Machine, stack: tuple[Path | None, Sequence[Medium]]) -> str:
        media = ", ".join(f"{medium.tier['name']} {self.orders(medium.marks())}" for medium in stack[1])
        tiers = ", ".join(f"{tier.name} {engine.available(tier.name)}" for tier in engine.manager.secondary_tiers)
        return f"engine {self.orders(set(agreement(engine).known))}; {media}; {tiers}"

    def close(self) -> None:
        for engine in self.running():
            engine.manager.shutdown()


def agreement(engine: Machine) -> EpochAgreement:
    found: EpochAgreement = engine.manager.secondary_tiers[0]._life._agreement  # type: ignore[attr-defined]
    return found


Make = Callable[[str], list[Medium]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Function that starts two media: a bucket, and another bucket or a pool."""
    with ExitStack() as stack:

        def start(kind: str) -> list[Medium]:
            first = stack.enter_context(fake_s3())
            for name, value in first.environment().items():
                monkeypatch.setenv(name, value)
            media: list[Medium] = [Bucket(first, "first")]
            if kind == "bucket":
                media.append(Bucket(stack.enter_context(fake_s3()), "second"))
            else:
                pool = Pool(stack.enter_context(serving()), "second")
                stack.callback(pool.close)
                media.append(pool)
            stack.callback(media[0].admin.close)
            return media

        yield start


def walk(seed: int, path: Path, media: Sequence[Medium], steps: int) -> int:
    """Walk at random, and return the number of blocks that were checked."""
    path.mkdir()
    walked = Walk(seed, path, media)
    try:
        for _ in walked.engines:
            walked.start()
        for _ in range(steps):
            walked.act()
    except BaseException as error:
        error.add_note("\n".join([f"seed {seed}", *walked.log[-60:]]))
        raise
    finally:
        walked.close()
        for medium in media:
            if not medium.up:
                medium.start()
                medium.up = True
            medium.flush()
    return walked.checks


@pytest.mark.parametrize("kind", ["bucket", "pool"])
def test_no_older_block_is_loaded_in_short_walks(tmp_path: Path, make: Make, kind: str) -> None:
    media = make(kind)
    checks = sum(walk(seed, tmp_path / str(seed), media, 60) for seed in range(3))
    assert checks > 150


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bucket", "pool"])
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_no_older_block_is_loaded_in_long_walks(tmp_path: Path, make: Make, kind: str, seed: int) -> None:
    assert walk(seed, tmp_path / str(seed), make(kind), 400) > 300
