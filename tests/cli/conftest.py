from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import RawBucket, S3Endpoint, moto_server
from tests.tiers.local.rig import LocalRig

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
