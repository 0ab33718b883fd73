"""The parameters of a namespace, and the log line that explains a cold start beside other namespaces."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from tiering.api.namespace import ModelIdentity, Namespace
from tiering.epochs.documents import lease_document
from tiering.epochs.nearest import log_nearest
from tiering.epochs.opener import Opener
from tiering.errors import TemporaryStoreError
from tiering.secondary.contract import TierContext
from tiering.testing.faults import DictStore
from tiers.local.layout import SegmentGeometry
from tiers.local.store import LocalStore

CAPACITY = 16 << 20
GEOMETRY = SegmentGeometry.plan(CAPACITY, 64 << 10, 1 << 30)
COMMIT, OTHER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
MODEL = ModelIdentity(
    name="org/model", weights=f"commit {COMMIT}", dtype="bfloat16", layout="test", overrides={"rope": 1}
)


def namespace(model: ModelIdentity, salt: str = "") -> Namespace:
    return Namespace.build(model, (4096,), salt=salt)


@pytest.mark.parametrize("name", ["/models/model", "/home/me/link", "/cache/models--org--model/snapshots/" + COMMIT])
@pytest.mark.parametrize("weights", [f"commit {COMMIT}", f"files {OTHER[:32]}"])
def test_identified_weights_are_the_same_under_every_name(name: str, weights: str) -> None:
    model = replace(MODEL, weights=weights)
    assert namespace(replace(model, name=name)) == namespace(model)


def test_other_weights_are_others_under_the_same_name() -> None:
    assert namespace(replace(MODEL, weights=f"commit {OTHER}")) != namespace(MODEL)


def test_a_name_counts_where_the_weights_are_only_named_too() -> None:
    for weights in ("v1", "main", "dummy weights, seed 0"):
        model = replace(MODEL, weights=weights)
        assert namespace(replace(model, name="other")) != namespace(model)


# ------------------------------------------------------------------------------------------------ the nearest of others


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A local tier's store, not opened yet."""
    return LocalStore(tmp_path / "tier", GEOMETRY, CAPACITY)


def enter(store: LocalStore, namespace: Namespace) -> None:
    opener = Opener(TierContext("local", memoryview(b""), (1,), namespace), store)
    opener.enter(None)
    opener.close(10)


def test_a_new_namespace_says_what_differs_from_the_nearest_one(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    enter(store, namespace(replace(MODEL, weights=f"commit {OTHER}", dtype="float16", layout="another")))
    enter(store, namespace(replace(MODEL, overrides={"rope": 2})))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        enter(store, namespace(MODEL))
    (line,) = [record.getMessage() for record in caplog.records if "begins empty" in record.getMessage()]
    assert "of 2 other namespaces" in line
    assert "differs in model.overrides.rope (2 there, 1 here)" in line
    assert OTHER not in line


def test_neither_the_first_namespace_of_a_medium_nor_one_that_is_known_says_anything(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        enter(store, namespace(MODEL))
    assert "begins empty" not in caplog.text


def test_what_differs_is_kept_for_the_explanation_of_misses(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    def cold_start(own: Namespace, revision: str | None = None) -> dict[str, str]:
        context = TierContext("local", memoryview(b""), (1,), own, revision=revision)
        opener = Opener(context, store)
        opener.enter(None)
        opener.close(10)
        return context.agreement.cold_starts

    assert cold_start(namespace(replace(MODEL, dtype="float16"))) == {}
    assert cold_start(namespace(MODEL)) == {"local": 'model.dtype ("float16" there, "bfloat16" here)'}
    assert cold_start(namespace(MODEL)) == {}
    assert cold_start(namespace(MODEL), "v2") == {"local": "revision"}
    assert "its blocks were stored with another revision" in caplog.text
    assert cold_start(namespace(MODEL), "v2") == {}


def test_blocks_of_other_revisions_on_a_shared_medium_are_known_by_their_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = DictStore()

    def cold_start(revision: str | None) -> dict[str, str]:
        context = TierContext("bucket", memoryview(b""), (1,), namespace(MODEL), revision=revision)
        Opener(context, store, shared=True).enter(None)
        if revision is not None:
            store.write_document(lease_document(namespace(MODEL).revision_epoch(revision)), b"")
        return context.agreement.cold_starts

    assert cold_start("v1") == {}
    assert cold_start("v1") == {}
    assert cold_start("v2") == {"bucket": "revision"}
    assert cold_start("v1") == cold_start("v2") == {}
    with monkeypatch.context() as patched:
        patched.setattr(store, "list_documents", Mock(side_effect=TemporaryStoreError("no")))
        assert cold_start("v3") == {}


def test_blocks_without_a_revision_on_a_shared_medium_are_known_by_their_epoch() -> None:
    store = DictStore()
    for revision, differs in ((None, {}), ("v1", {"bucket": "revision"})):
        context = TierContext("bucket", memoryview(b""), (1,), namespace(MODEL), revision=revision)
        Opener(context, store, shared=True).enter(None)
        assert context.agreement.cold_starts == differs


def test_a_salt_is_not_written_out(caplog: pytest.LogCaptureFixture) -> None:
    store = DictStore()
    own, other = namespace(MODEL, "secret"), namespace(MODEL, "other")
    store.write_document("namespace-other.json", other.parameters.encode())
    log_nearest("local", store, own.parameters, "namespace-")
    assert caplog.messages[-1].endswith("(namespace-other.json) differs in salt")


def test_documents_that_are_damaged_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    store = DictStore()
    store.write_document("namespace-a.json", b"\xff\xfe")
    store.write_document("namespace-b.json", b"[1]")
    store.write_document("namespace-c.json", b'{"a": 1}')
    for depth in (200, 400, 800, 100_000):
        store.write_document(f"namespace-{depth}.json", b'{"a":' * depth + b"1" + b"}" * depth)
    log_nearest("local", store, namespace(MODEL).parameters, "namespace-")
    assert "namespace-100000" not in caplog.text
    assert "namespace-b" not in caplog.text
    assert "the nearest (namespace-" in caplog.text
