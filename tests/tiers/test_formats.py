"""Two releases with different formats of blocks, one after the other on the same medium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.fake_s3 import fake_s3
from tests.tiers.local.rig import LocalRig
from tests.tiers.object.rigs import make_rig
from tiering.api import namespace
from tiering.medium import frame
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import TierRig

K = [key_of(number) for number in range(30)]

Open: TypeAlias = Callable[[], TierRig]


@pytest.fixture(params=["local", "object"])
def medium(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    if request.param == "local":
        yield lambda: LocalRig(tmp_path).open()
        return
    with fake_s3() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        yield lambda: make_rig(fake).open()


@contextmanager
def release(medium: Open, version: int) -> Iterator[TierRig]:
    """A tier of the release whose blocks have format ``version``."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (namespace, frame):
            patch.setattr(module, "FORMAT_VERSION", version)
        rig = medium()
        try:
            yield rig
        finally:
            rig.close()


def test_no_release_serves_blocks_of_another_format_or_harms_more_than_it_overwrites(medium: Open) -> None:
    present = namespace.FORMAT_VERSION
    with release(medium, present) as rig:
        assert rig.store(K[:20]) == K[:20]
    with release(medium, present + 1) as rig:
        assert [key for key in K if rig.lookup([key])] == []
        assert rig.store(K[20:]) == K[20:]
        assert rig.load(K[20:]) == K[20:]
    with release(medium, present) as rig:
        found = [key for key in K if rig.lookup([key])]
        assert set(found) <= set(K[:20])
        # on a disk, the slots of the other format's blocks are free
        assert len(found) >= 10
        assert rig.load(found) == found
        assert rig.tier.get_stats().corrupt_blocks == 0
