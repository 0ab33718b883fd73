"""The tier of vLLM's own tiering, behind vLLM's real OffloadingConnector and TieringOffloadingManager.

vLLM's copies to the GPU need CUDA, so the tests write and read the rows of vLLM's CPU tier in their place. All else is
vLLM's: its configuration of a real model, its factory of tiers, its manager.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from numpy.typing import NDArray
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering import base as tiers
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.engines.vllm_tier.double import FACTS, METHODS
from tests.vllm.models import write_llama
from tiering.engines.vllm.lookup import StartupError
from tiering.engines.vllm_tier import KVTieringTier, register
from tiering.testing.clock import until
from tiering.testing.tier_rig import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
MODULE = {"type": "KVTieringTier", "module_path": "tiering.engines.vllm_tier"}
PLUGIN = {"type": "kv_tiering"}
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]
BLOCKS = 24


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Load the plugin that pyproject.toml declares, as vLLM does, and leave the registry as it was."""
    monkeypatch.setattr("tiering.engines.mailbox.STATS_SECONDS", 0.0)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert list(declared) == ["kv_tiering"]
    assert EntryPoint("kv_tiering", declared["kv_tiering"], "vllm.general_plugins").load() is register
    register()
    register()
    yield
    SecondaryTierFactory._registry.pop("kv_tiering")


def local(path: Path, **words: Any) -> dict[str, Any]:
    return {"type": "local", "path": str(path), "capacity": "64MiB", "segment_size": "4MiB", **words}


def tier(path: Path, named: dict[str, Any] = MODULE, **words: Any) -> dict[str, Any]:
    return {**named, "primary": {"capacity": "4MiB"}, "secondary": [local(path)], "shutdown_deadline": "20s", **words}


def caches(*specs: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(LAYERS, spec) for spec in specs]
    return KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=groups)


FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)


class Engine:
    """The scheduler's side of vLLM's own offloading, with the part of the workers played by the test."""

    def __init__(self, model: Path, secondary: list[dict[str, Any]], cache: KVCacheConfig | None = None) -> None:
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 4 << 20, "secondary_tiers": secondary}
        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
        config = EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            max_model_len=640,
            kv_transfer_config=transfer,
        ).create_engine_config()
        self.connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache or caches(FULL))
        self.manager: Any = self.connector.scheduler.manager
        self.tier: Any = self.manager.secondary_tiers[0]
        self.extra = extra

    def rows(self) -> NDArray[np.uint8]:
        """Return vLLM's rows; vLLM cannot unmap them while a test has them."""
        view: memoryview = self.manager.primary_tier.get_kv_memoryview()
        return np.asarray(view).view(np.uint8)

    def begin(self, name: str) -> base.ReqContext:
        ctx = base.ReqContext(name)
        self.manager.on_new_request(ctx)
        return ctx

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))

    def until(self, happened: Callable[[], bool]) -> None:
        def is_over() -> bool:
            if not (over := happened()):
                self.step()
            return over

        assert until(is_over, PATIENCE_SECONDS)

    def store(self, keys: Sequence[Any], content: NDArray[np.uint8], name: str = "stores") -> None:
        """Store blocks through vLLM's CPU tier, and wait until the tier has them."""
        ctx = self.begin(name)
        output = self.manager.prepare_store(list(keys), ctx)
        assert output is not None
        self.rows()[output.store_spec.chunk_ids] = content
        self.manager.complete_store(list(keys), ctx)
        self.manager.on_request_finished(ctx)
        self.until(lambda: not self.manager.has_pending_work())

    def reset(self) -> None:
        """Reset vLLM's cache, and let promotions begin again, for which vLLM 0.33 waits for its workers."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def look_up(self, keys: Sequence[Any], ctx: base.ReqContext) -> int:
        """Return the number of leading blocks that are hits, as vLLM's scheduler counts them."""
        hits = 0

        def is_decided() -> bool:
            nonlocal hits
            hits, waits = 0, False
            for key in keys:
                answer = self.manager.lookup(key, ctx)
                if answer is base.LookupResult.MISS:
                    break
                waits = waits or answer is not base.LookupResult.HIT
                hits += answer is not base.LookupResult.RETRY
            self.step()
            return not waits

        assert until(is_decided, PATIENCE_SECONDS)
        return hits

    def load(self, keys: Sequence[Any], ctx: base.ReqContext) -> NDArray[np.uint8]:
        """Return the bytes that vLLM would copy to the GPU."""
        spec = self.manager.prepare_load(list(keys), ctx)
        found: NDArray[np.uint8] = self.rows()[spec.chunk_ids].copy()
        self.manager.complete_load(list(keys), ctx)
        return found

    def counters(self) -> dict[str, Any]:
        """Return the tier's own statistics, as of a step of its thread."""
        return dict(self.tier._thread.stats.get("tiers", {"local": {"writable": 0}})["local"])


@contextmanager
def engine(model: Path, *secondary: dict[str, Any], cache: KVCacheConfig | None = None) -> Iterator[Engine]:
    started = Engine(model, list(secondary), cache)
    identified = started.tier._identification
    try:
        if identified is not None:
            identified._ended.wait()
            started.until(lambda: bool(started.counters()["writable"]))
        yield started
    finally:
        started.manager.shutdown()


def keys_of(number: int, group: int = 0, first: int = 0) -> list[Any]:
    return [base.make_offload_key(index.to_bytes(32, "big"), group) for index in range(first, first + number)]


def content_for(started: Engine, number: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (number, started.rows().shape[1]), np.uint8)


@pytest.mark.parametrize("named", [MODULE, PLUGIN], ids=["module_path", "plugin"])
def test_blocks_come_back_byte_for_byte_after_a_restart(llama: Path, tmp_path: Path, named: dict[str, Any]) -> None:
    keys = keys_of(BLOCKS)
    with engine(llama, tier(tmp_path, named)) as first:
        assert type(first.tier) is KVTieringTier
        assert first.tier.locality is base.Locality.LOCAL
        content = content_for(first, BLOCKS)
        first.store(keys, content)
    with engine(llama, tier(tmp_path, named)) as second:
        ctx = second.begin("loads")
        assert second.look_up([*keys, *keys_of(3, first=1000)], ctx) == BLOCKS
        assert second.manager.get_load_source(keys[0], ctx) is tiers.CacheHitSource.DISK
        assert np.array_equal(second.load(keys, ctx), content)
        second.manager.on_request_finished(ctx)
        second.until(lambda: bool(second.tier._thread.stats["tiers"]["local"]["hits"]))
        reported: dict[str, Any] = {}
        second.until(lambda: "kv_tiering_hits" in reported or _report(second, reported))
        assert reported["kv_tiering_hits"][("local",)] >= BLOCKS
        assert reported["vllm:kv_offload_tiering_read_bytes"]


def _report(started: Engine, into: dict[str, Any]) -> bool:
    stats = started.manager.get_stats()
    into.update({} if stats is None else stats.data["data"])
    return False


def test_a_corrupt_file_is_a_counted_miss(llama: Path, tmp_path: Path) -> None:
    keys = keys_of(BLOCKS)
    with engine(llama, tier(tmp_path)) as first:
        first.store(keys, content_for(first, BLOCKS))
    segments = [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]
    assert segments
    for file in segments:
        data = np.memmap(file, np.uint8, "r+")
        data[8192::8192] ^= 0xFF
        data.flush()
    with engine(llama, tier(tmp_path)) as second:
        before = second.rows().copy()
        ctx = second.begin("loads")
        assert second.look_up(keys, ctx) == 0
        second.until(lambda: second.counters()["corrupt_blocks"] > 0)
        assert np.array_equal(second.rows(), before)
        second.manager.on_request_finished(ctx)


def test_other_weights_and_another_layout_never_read_the_blocks(llama: Path, tmp_path: Path) -> None:
    keys = keys_of(4)
    with engine(llama, tier(tmp_path / "kv")) as first:
        first.store(keys, content_for(first, 4))
    other = write_llama(tmp_path / "other", seed=1)
    for model, cache in [(other, caches(FULL)), (llama, caches(FULL, WINDOW)), (llama, caches(WINDOW))]:
        with engine(model, tier(tmp_path / "kv"), cache=cache) as second:
            ctx = second.begin("loads")
            assert second.look_up(keys, ctx) == 0
            second.manager.on_request_finished(ctx)
    with engine(llama, tier(tmp_path / "kv")) as again:
        ctx = again.begin("loads")
        assert again.look_up(keys, ctx) == 4
        again.manager.on_request_finished(ctx)


def test_a_window_is_searched_from_its_end_past_missing_blocks(llama: Path, tmp_path: Path) -> None:
    keys = keys_of(6, group=1)
    with engine(llama, tier(tmp_path), cache=caches(FULL, WINDOW)) as first:
        content = content_for(first, 6)
        first.store([keys[0], keys[1], keys[3]], content[[0, 1, 3]])
    with engine(llama, tier(tmp_path), cache=caches(FULL, WINDOW)) as second:
        ctx, answers = second.begin("loads"), {}
        pending = {base.LookupResult.RETRY, base.LookupResult.HIT_PENDING}

        def decided() -> bool:
            answers.update({key: second.manager.lookup(key, ctx) for key in reversed(keys)})
            return pending.isdisjoint(answers.values())

        second.until(decided)
        hits = [key for key in keys if answers[key] is base.LookupResult.HIT]
        assert hits == [keys[0], keys[1], keys[3]]
        assert np.array_equal(second.load(hits, ctx), content[[0, 1, 3]])
        second.manager.on_request_finished(ctx)


def test_a_reset_holds_also_after_a_restart(llama: Path, tmp_path: Path) -> None:
    keys = keys_of(4)
    with engine(llama, tier(tmp_path)) as first:
        first.store(keys, content_for(first, 4))
        first.reset()
        ctx = first.begin("after")
        first.until(lambda: bool(first.counters()["writable"]))
        assert first.look_up(keys, ctx) == 0
        first.manager.on_request_finished(ctx)
    with engine(llama, tier(tmp_path)) as second:
        ctx = second.begin("restarted")
        assert second.look_up(keys, ctx) == 0
        second.manager.on_request_finished(ctx)


def test_a_reset_with_keep_secondary_keeps_the_disk(llama: Path, tmp_path: Path) -> None:
    keys = keys_of(4)
    with engine(llama, tier(tmp_path, keep_secondary=True)) as started:
        content = content_for(started, 4)
        started.store(keys, content)
        started.until(lambda: started.counters()["written_bytes"] >= content.nbytes)
        started.reset()
        ctx = started.begin("after")
        assert started.look_up(keys, ctx) == 4
        assert np.array_equal(started.load(keys, ctx), content)
        started.manager.on_request_finished(ctx)


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Let the disk hang in calls of one kind, until the test has ended."""
    from tiers.local.store import LocalStore

    gate = threading.Event()

    def hang(name: str) -> threading.Event:
        called = threading.Event()

        def method(*arguments: Any, **words: Any) -> Any:
            called.set()
            gate.wait()
            raise OSError("the device is gone")

        monkeypatch.setattr(LocalStore, name, method)
        return called

    yield hang
    gate.set()


def test_a_disk_that_hangs_holds_up_neither_a_reset_nor_a_shutdown_and_never_writes_vllms_rows(
    llama: Path, tmp_path: Path, hung: Callable[[str], threading.Event]
) -> None:
    keys = keys_of(4)
    with engine(llama, tier(tmp_path)) as first:
        first.store(keys, content_for(first, 4))
    with engine(llama, tier(tmp_path, shutdown_deadline="0.2s")) as second:
        called = hung("get")
        ctx = second.begin("loads")
        second.until(lambda: second.manager.lookup(keys[0], ctx) is base.LookupResult.RETRY and called.is_set())
        assert not second.manager._jobs  # the lookup waits, and no job of vLLM does
        second.reset()
        before = second.rows().copy()
        assert second.look_up(keys, ctx) == 0
        second.manager.on_request_finished(ctx)
        assert np.array_equal(second.rows(), before)


def test_stores_to_a_disk_that_hangs_end_and_reset_and_shutdown_do_not_wait(
    llama: Path, tmp_path: Path, hung: Callable[[str], threading.Event]
) -> None:
    with engine(llama, tier(tmp_path, shutdown_deadline="0.2s")) as started:
        called = hung("put")
        started.store(keys_of(BLOCKS), content_for(started, BLOCKS))
        started.until(called.is_set)
        started.store(keys_of(BLOCKS, first=100), content_for(started, BLOCKS), "more")
        started.reset()
        assert not started.manager._jobs


def test_lookups_may_come_from_another_thread(llama: Path, tmp_path: Path) -> None:
    keys = keys_of(BLOCKS)
    with engine(llama, tier(tmp_path)) as first:
        content = content_for(first, BLOCKS)
        first.store(keys, content)
    with engine(llama, tier(tmp_path)) as second:
        lock, ended = threading.Lock(), threading.Event()
        found: list[Any] = []
        peer = second.begin("peer")

        def is_found() -> bool:
            with lock:
                found[:] = [second.tier.lookup(key, peer) for key in keys]
                list(second.tier.take_events())
            return base.LookupResult.RETRY not in found

        def poll() -> None:
            until(is_found, PATIENCE_SECONDS)
            ended.set()

        def is_hit() -> bool:
            with lock:
                answers = [second.manager.lookup(key, own) for key in keys]
                second.step()
            return ended.is_set() and all(answer is base.LookupResult.HIT for answer in answers)

        thread = threading.Thread(target=poll)
        thread.start()
        own = second.begin("own")
        assert until(is_hit, PATIENCE_SECONDS)
        thread.join()
        assert set(found) == {base.LookupResult.HIT}
        assert np.array_equal(second.load(keys, own), content)
        second.manager.on_request_finished(own)
        second.manager.on_request_finished(peer)


def test_what_events_announce_is_stored_on_this_machine(llama: Path, tmp_path: Path) -> None:
    from unittest.mock import patch

    keys = keys_of(4)
    with (
        patch.object(base.OffloadingSpec, "__init__", _publishing(base.OffloadingSpec.__init__)),
        engine(llama, tier(tmp_path)) as started,
    ):
        started.store(keys, content_for(started, 4))
        events: list[Any] = []

        def announced() -> bool:
            events.extend(started.tier.take_events())
            return bool(events)

        started.until(announced)
        assert {event.medium for event in events} == {base.Medium.STORAGE}
        assert {event.locality for event in events} == {base.Locality.LOCAL}
        assert {key for event in events for key in event.keys} <= set(keys)
        assert not any(event.removed for event in events)
        assert events[0].ownership == "local"


def _publishing(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, config: Any) -> None:
        original(self, dataclasses.replace(config, enable_kv_cache_events=True))

    return init


def test_the_front_end_refuses_an_invalid_dictionary_before_the_engine_starts(tmp_path: Path) -> None:
    wrong = tier(tmp_path)
    wrong["secondary"][0]["capcity"] = wrong["secondary"][0].pop("capacity")
    with pytest.raises(StartupError, match=r"secondary\[0\]\.capcity: unknown word; did you mean capacity\?"):
        TieringOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [wrong]})
    good = {"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [tier(tmp_path)]}
    assert "kv_tiering_corrupt_blocks" in TieringOffloadingSpec.build_metric_definitions(good)


def test_the_stand_in_for_vllm_has_the_signatures_of_the_installed_one() -> None:
    facts = FACTS[vllm.__version__.partition("+")[0]]
    assert {field.name for field in dataclasses.fields(tiers.JobResult)} == set(facts.result)
    assert {field.name for field in dataclasses.fields(base.OffloadingEvent)} == set(facts.event)
    assert facts.rows in {field.name for field in dataclasses.fields(tiers.TransferJob)}
    parameters = inspect.signature(tiers.SecondaryTierManager.__init__).parameters
    assert ("backpressure_detector" in parameters) is facts.detector
    assert hasattr(tiers.SecondaryTierManager, "cache_hit_source") is facts.sources
    for name, names in METHODS.items():
        method = inspect.getattr_static(tiers.SecondaryTierManager, name)
        expected = inspect.signature(getattr(method, "__func__", method)).parameters
        assert tuple(word for word in expected if word not in {"self", "cls"}) == names
        assert hasattr(KVTieringTier, name)
    assert not KVTieringTier.__abstractmethods__
