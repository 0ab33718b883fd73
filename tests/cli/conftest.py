from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.fake_s3 import FakeS3, fake_s3
from tests.servers import RawBucket, S3Endpoint, moto_server
from tests.tiers.local.rig import LocalRig
from tiering.api.namespace import Namespace
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object import S3_TIER, S3Options

WriteStack = Callable[..., Path]
SMALL = {"capacity": "4MiB", "segment_size": "512KiB"}
"""Sizes of a local tier for tests."""


@pytest.fixture
def write_stack(tmp_path: Path) -> WriteStack:
    """Write a stack of these tiers, and return the path of its file."""

    def write(*tiers: Mapping[str, Any], capacity: object = "16MiB", **words: object) -> Path:
        path = tmp_path / "stack.yaml"
        path.write_text(yaml.safe_dump({"primary": {"capacity": capacity}, "secondary": list(tiers)} | words))
        return path

    return write


@pytest.fixture
def disk(write_stack: WriteStack, tmp_path: Path) -> Path:
    return write_stack({"type": "local", "path": str(tmp_path / "kv")} | SMALL)


@pytest.fixture
def make_local(tmp_path: Path) -> Iterator[Callable[..., LocalRig]]:
    rigs: list[LocalRig] = []

    def build(model: str = "model-a") -> LocalRig:
        rigs.append(LocalRig(tmp_path / "kv", model=model, **SMALL))  # type: ignore[arg-type]
        return rigs[-1].open()

    yield build
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Endpoint]:
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def bucket(moto: S3Endpoint, use: Callable[[Any], None], request: pytest.FixtureRequest) -> RawBucket:
    use(moto)
    return moto.make_bucket(f"kv-{abs(hash(request.node.nodeid)):x}")


class Pool(NamedTuple):
    """A bucket with blocks of a namespace."""

    fake: FakeS3
    stack: Path
    namespace: Namespace


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    with fake_s3() as fake:
        for name, value in fake.environment().items():
            monkeypatch.setenv(name, value)
        words = {"bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod/", "retries": {"attempts": 1}}
        rig = TierRig(
            lambda context: S3_TIER.build(S3Options.model_validate(words), context), group_bytes=(64 << 10,)
        ).open()
        assert rig.store(K[:2]) == K[:2]
        rig.close()
        stack = tmp_path / "bucket.yaml"
        stack.write_text(yaml.safe_dump({"primary": {"capacity": "8MiB"}, "secondary": [{"type": "s3", **words}]}))
        yield Pool(fake, stack, rig.context.namespace)
