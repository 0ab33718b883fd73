"""Requests of a variant: the engine's hashes do not cover the content that they compute with."""

from __future__ import annotations

from typing import Any

import pytest

from tests.connector.fakes import (
    FakeManager,
    FakeRequest,
    FakeSchedulerOutput,
    finished,
    go_on,
    ids,
    make_scheduler,
    prompt,
    run_prompt,
)
from tiering.api.keys import get_offload_block_hash, make_offload_key
from tiering.connector import variants
from tiering.connector.metadata import OffloadingConnectorMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.variants import OwnHashes, Variant


def variant_of(identity: str, own_hashes: OwnHashes | None = None) -> Variant:
    variant = Variant(own_hashes)
    if identity:
        variant.identify(identity)
    return variant


def ask(tokens: int, name: str, variant: Variant) -> Any:
    request = prompt(tokens, name)
    request.variant = variant  # type: ignore[attr-defined]
    return request


def names(request: FakeRequest, identity: str) -> list[bytes]:
    return [make_offload_key(name, 0) for name in variant_of(identity).names_of(request.block_hashes)]


def store(
    scheduler: OffloadingConnectorScheduler, request: FakeRequest, blocks: list[int], found: int = 0
) -> OffloadingConnectorMetadata:
    meta = run_prompt(scheduler, request, blocks, computed=found)
    scheduler.update_connector_output(finished(*(order.job_id for order in meta.reqs_to_store.values())))
    return meta


def held(manager: FakeManager) -> set[bytes]:
    return {key for key in manager.rows if manager.refs[key] >= 0}


def test_names_cover_content_and_hash_and_are_as_long_as_the_hash() -> None:
    hashes = prompt(40).block_hashes
    one, other = variant_of("A"), variant_of("B")
    assert list(one.names_of(hashes)) == list(variant_of("A").names_of(hashes))
    assert len({*one.names_of(hashes), *other.names_of(hashes), *hashes}) == 30
    assert {len(name) for name in one.names_of(hashes)} == {32}
    assert len(one.names_of([hashes[0][:16]])[0]) == 16
    assert variant_of("A").names_of(hashes)[3] == one.names_of(hashes)[1:5][2]


def test_a_name_does_not_change_between_versions() -> None:
    """Tiers outlive this process: other names would be misses for ever."""
    (name,) = variant_of("identity").names_of([bytes(range(32))])
    assert name.hex() == "ec31bcd797882cabfda3b7c12372437031dabaf90dc151806c0e9c195c03206b"


def test_requests_of_equal_content_share_blocks_and_others_do_not() -> None:
    scheduler, manager = make_scheduler()
    first = ask(40, "r1", variant_of("A"))
    store(scheduler, first, ids(10))
    assert held(manager) == set(names(first, "A"))
    assert scheduler.get_num_new_matched_tokens(ask(40, "r2", variant_of("A")), 0) == (40, True)
    assert scheduler.get_num_new_matched_tokens(ask(40, "r3", variant_of("B")), 0) == (0, False)
    assert scheduler.get_num_new_matched_tokens(prompt(40, "r4"), 0) == (0, False)


def test_a_request_whose_content_is_not_known_uses_no_tier_until_it_is() -> None:
    scheduler, manager = make_scheduler()
    variant = variant_of("")
    request = ask(42, "r1", variant)
    assert not store(scheduler, request, ids(11)).reqs_to_store
    assert "r1" not in scheduler._storing  # the next steps do not look at it
    variant.identify("A")
    scheduler.variant_changed(variant)
    meta = go_on(scheduler, request, 1)
    scheduler.update_connector_output(finished(meta.reqs_to_store["r1"].job_id))
    assert held(manager) == set(names(request, "A"))


def test_a_void_variant_neither_loads_nor_stores_and_its_stores_in_flight_fail() -> None:
    scheduler, manager = make_scheduler()
    old, plain = variant_of("A"), prompt(40, "plain")
    waiting, running = ask(40, "waiting", old), ask(40, "running", old)
    manager.hold(names(waiting, "A")[:4])
    meta = run_prompt(scheduler, running, ids(11))
    own = run_prompt(scheduler, plain, ids(10, 20))
    jobs = [meta.reqs_to_store["running"].job_id, own.reqs_to_store["plain"].job_id]
    scheduler.on_new_request(waiting)
    old.is_void = True
    scheduler.variant_changed(old)
    scheduler.update_connector_output(finished(*jobs))
    assert held(manager) == set(names(waiting, "A")[:4])
    assert scheduler.get_num_new_matched_tokens(waiting, 0) == (0, False)
    running.append(1, 2, 3, 4)
    assert not go_on(scheduler, running, 4, ids(1, 11)).reqs_to_store
    plain.append(1)  # what failed of other requests is offered again
    meta = go_on(scheduler, plain, 1, ids(1, 40))
    scheduler.update_connector_output(finished(meta.reqs_to_store["plain"].job_id))
    assert set(plain.keys()) < held(manager)
    scheduler.request_finished(running, ids(11))
    assert not scheduler.build_connector_meta(FakeSchedulerOutput()).reqs_to_store


@pytest.mark.parametrize(("owner", "trusted"), [("A", True), ("B", False), ("", False), ("void", False)])
def test_blocks_that_another_content_has_filled_are_not_stored_nor_what_is_computed_on_top(
    owner: str, trusted: bool
) -> None:
    """The engine's own cache finds them: it knows them by the same hashes."""
    scheduler, manager = make_scheduler()
    filler = variant_of({"void": "A"}.get(owner, owner))
    run_prompt(scheduler, ask(16, "r1", filler), ids(4))
    if owner == "void":
        filler.is_void = True
    finder = ask(40, "r2", variant_of("A"))
    meta = store(scheduler, finder, ids(10), found=16)
    assert ("r2" in meta.reqs_to_store) == trusted
    third = ask(44, "r3", variant_of("A"))
    assert ("r3" in store(scheduler, third, [*ids(10), 30], found=40).reqs_to_store) == trusted
    scheduler.get_stats()
    # The same blocks are trusted again when they are filled again.
    last = ask(40, "r4", variant_of("A"))
    manager.drop(*[key for key in held(manager) if manager.refs[key] == 0])
    assert "r4" in store(scheduler, last, ids(10)).reqs_to_store


def test_blocks_that_a_running_request_gets_are_its_own() -> None:
    scheduler, manager = make_scheduler()
    first = ask(16, "r1", variant_of("A"))
    run_prompt(scheduler, first, ids(4))
    first.append(*range(16, 24))
    go_on(scheduler, first, 8, ids(2, 5))
    meta = store(scheduler, ask(40, "r2", variant_of("A")), ids(10), found=24)
    assert "r2" in meta.reqs_to_store
    assert manager.rows


def test_blocks_that_another_connector_loaded_are_not_stored() -> None:
    """It knows them by the engine's hashes, so they may belong to another content."""
    scheduler, manager = make_scheduler()
    request = ask(40, "r1", variant_of("A"))
    scheduler.get_num_new_matched_tokens(request, 0)
    request.num_computed_tokens = 24
    assert not scheduler.build_connector_meta(FakeSchedulerOutput().new(request, 16, ids(10))).reqs_to_store
    assert not store(scheduler, ask(44, "r2", variant_of("A")), [*ids(10), 30], found=40).reqs_to_store
    assert not manager.rows


def test_events_name_blocks_by_the_engine_s_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = OwnHashes()
    request = ask(40, "r1", variant_of("A", own))
    keys = [make_offload_key(name, 0) for name in request.variant.names_of(request.block_hashes)[:]]
    assert [own[get_offload_block_hash(key)] for key in keys] == request.block_hashes
    monkeypatch.setattr(variants, "MAX_OWN_HASHES", 3)
    own.add([b"new"], [b"hash"])
    assert list(own.values()) == [*request.block_hashes[-2:], b"hash"]
