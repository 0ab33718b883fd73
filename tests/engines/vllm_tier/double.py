"""A stand-in for vLLM's own tiering, by the signatures of its versions 0.27 to 0.33.

:data:`FACTS` was copied from the sources of these versions; a test in ``tests/vllm`` compares the installed one.
Modules of the names that the tier imports are made from it, so that the real class runs without vLLM.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.stand_ins import module, standing_in
from tiering.testing.clock import until


@dataclass(frozen=True)
class Facts:
    """Names in the interface of one version of vLLM."""

    rows: str
    """Name of the rows of a job."""
    result: tuple[str, ...]
    """Fields of a result."""
    event: tuple[str, ...]
    """Fields of an event."""
    detector: bool
    """True if a tier has a backpressure_detector."""
    sources: bool
    """True if a tier has a cache_hit_source."""


_RESULT = ("job_id", "success", "successful_keys", "transfer_time")
_EVENT = ("keys", "medium", "removed", "locality")
_OWNED = (*_EVENT, "ownership", "removal_expected")
FACTS = {
    "0.27.0": Facts("block_ids", _RESULT, _EVENT, False, False),
    "0.28.0": Facts("block_ids", _RESULT, _EVENT, False, False),
    "0.29.0": Facts("block_ids", _RESULT, _OWNED, False, False),
    "0.30.0": Facts("chunk_ids", _RESULT, _OWNED, False, False),
    "0.31.0": Facts("chunk_ids", (*_RESULT, "transfer_bytes"), _OWNED, True, False),
    "0.32.0": Facts("chunk_ids", (*_RESULT, "transfer_bytes"), _OWNED, True, True),
    "0.33.0": Facts("chunk_ids", (*_RESULT, "transfer_bytes"), (*_OWNED, "metadata_only"), True, True),
}
"""Version → its facts."""

METHODS = {
    "lookup": ("key", "req_context"),
    "submit_store": ("job_metadata",),
    "submit_load": ("job_metadata",),
    "get_finished_jobs": (),
    "take_events": (),
    "touch": ("keys", "req_context"),
    "on_new_request": ("req_context",),
    "on_request_finished": ("req_context",),
    "on_schedule_end": ("context",),
    "drain_jobs": (),
    "shutdown": (),
    "build_metric_definitions": ("extra_config",),
    "get_stats": (),
}
"""Method of a tier → names of its parameters, in every version."""


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(enum.Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class CacheHitSource(enum.Enum):
    DISK = "disk"
    EXTERNAL_UNSPECIFIED = "external"


@dataclass
class RequestContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass(frozen=True)
class Definition:
    documentation: str
    labelnames: tuple[str, ...] = ()


class Report:
    """vLLM's statistics of a tier."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[str, ...]], float] = {}

    def increase_counter(self, name: str, value: float = 1, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[name, labelvalues] = self.values.get((name, labelvalues), 0) + value

    def set_gauge(self, name: str, value: float, labelvalues: tuple[str, ...] = ()) -> None:
        self.values[name, labelvalues] = value


def _tier_class(facts: Facts) -> type:
    class SecondaryTierManager:
        medium: Medium | None = None

        def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, **further: Any) -> None:
            unknown = set(further) - ({"backpressure_detector"} if facts.detector else set())
            if unknown:
                raise TypeError(f"unexpected arguments {unknown}")
            self._primary_kv_view = primary_kv_view
            self.tier_type = tier_type
            self.locality: Locality | None = None
            self.bp_detector = further.get("backpressure_detector")

        def has_pending_work(self) -> bool:
            return False

        def serve_external_requests(self, parent: Any) -> None: ...

    if facts.sources:
        SecondaryTierManager.cache_hit_source = CacheHitSource.DISK  # type: ignore[attr-defined]
    return SecondaryTierManager


def _modules(version: str) -> Iterator[ModuleType]:
    facts = FACTS[version]
    yield module("vllm", __version__=version)
    names = ("vllm.v1", "vllm.v1.kv_offload", "vllm.v1.kv_offload.tiering", "vllm.distributed")
    for name in (*names, "vllm.distributed.kv_transfer", "vllm.distributed.kv_transfer.kv_connector"):
        yield module(name)
    yield module("vllm.distributed.kv_transfer.kv_connector.v1")
    yield module("vllm.distributed.kv_transfer.kv_connector.v1.offloading")
    yield module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics", OffloadingConnectorStats=Report)
    yield module(
        "vllm.v1.kv_offload.base",
        LookupResult=LookupResult,
        Medium=Medium,
        Locality=Locality,
        RequestOffloadingContext=RequestOffloadingContext,
        OffloadingEvent=dataclasses.make_dataclass("OffloadingEvent", [(name, Any, None) for name in facts.event]),
        OffloadingCounterMetadata=type("OffloadingCounterMetadata", (Definition,), {}),
        OffloadingGaugeMetadata=type("OffloadingGaugeMetadata", (Definition,), {}),
    )
    tiers = module(
        "vllm.v1.kv_offload.tiering.base",
        SecondaryTierManager=_tier_class(facts),
        JobResult=dataclasses.make_dataclass("JobResult", [(name, Any, None) for name in facts.result]),
    )
    if facts.sources:
        tiers.CacheHitSource = CacheHitSource  # type: ignore[attr-defined]
    yield tiers
    yield module("vllm.v1.kv_offload.tiering.factory", SecondaryTierFactory=_factory())


def _factory() -> type:
    class SecondaryTierFactory:
        _registry: dict[str, Any] = {}  # noqa: RUF012

        @classmethod
        def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
            if tier_type in cls._registry:
                raise ValueError(f"Tier '{tier_type}' is already registered.")
            cls._registry[tier_type] = lambda: getattr(importlib.import_module(module_path), class_name)

        @classmethod
        def get_tier_class(cls, tier_config: dict[str, Any]) -> Any:
            if tier_config["type"] in cls._registry:
                return cls._registry[tier_config["type"]]()
            return getattr(importlib.import_module(tier_config["module_path"]), tier_config["type"])

        @classmethod
        def create_secondary_tier(cls, tier_config: dict[str, Any], view: memoryview, spec: Any) -> Any:
            config = {word: value for word, value in tier_config.items() if word not in {"module_path", "type"}}
            kind = cls.get_tier_class(tier_config)
            return kind(offloading_spec=spec, primary_kv_view=view, tier_type=tier_config["type"], **config)

    return SecondaryTierFactory


@contextmanager
def installed(version: str) -> Iterator[Any]:
    """Install the stand-in for a version, and yield its factory of tiers."""
    *modules, factory = _modules(version)
    with standing_in([*modules, factory], "tiering.engines.vllm_tier.tier"):
        yield factory.SecondaryTierFactory


def spec_of(groups: int = 1, *, events: bool = False, engine_id: str = "engine") -> Any:
    """Return vLLM's summary of its configuration, from which nothing is known of the model's weights."""
    config = SimpleNamespace(
        groups=[SimpleNamespace(tokens_per_block=16, layer_names=("a",), group_id=number) for number in range(groups)],
        parallel=SimpleNamespace(world_size=1),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        engine_id=engine_id,
    )
    return SimpleNamespace(config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=events))


@dataclass
class Driver:
    """vLLM's side: rows of its CPU tier, requests, and steps until something has happened."""

    tier: Any
    rows: NDArray[np.uint8]
    facts: Facts
    results: dict[int, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin(self, name: str = "r") -> RequestContext:
        ctx = RequestContext(name)
        self.tier.on_new_request(ctx)
        return ctx

    def step(self) -> None:
        for result in self.tier.get_finished_jobs():
            assert result.job_id not in self.results
            self.results[result.job_id] = result
        self.tier.on_schedule_end(None)

    def until(self, happened: Any) -> None:
        def has_stepped() -> bool:
            self.step()
            return bool(happened())

        assert happened() or until(has_stepped), "it did not happen in time"

    def submit(self, keys: Sequence[bytes], rows: Sequence[int], ctx: RequestContext, *, load: bool) -> int:
        number = next(self._numbers)
        job = SimpleNamespace(
            job_id=number, keys=list(keys), is_promotion=load, req_context=ctx, **{self.facts.rows: np.array(rows)}
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return number

    def store(self, keys: Sequence[bytes], rows: Sequence[int], ctx: RequestContext) -> Any:
        number = self.submit(keys, rows, ctx, load=False)
        self.until(lambda: number in self.results)
        return self.results[number]

    def load(self, keys: Sequence[bytes], rows: Sequence[int], ctx: RequestContext) -> Any:
        number = self.submit(keys, rows, ctx, load=True)
        self.until(lambda: number in self.results)
        return self.results[number]

    def look_up(self, keys: Sequence[bytes], ctx: RequestContext) -> list[str]:
        """Repeat the lookup of ``keys`` until all are answered."""
        answers: list[str] = []

        def answered() -> bool:
            answers[:] = [self.tier.lookup(key, ctx).name for key in keys]
            return "RETRY" not in answers

        self.until(answered)
        return answers

    def promote(self, keys: Sequence[bytes], rows: Sequence[int], ctx: RequestContext) -> list[bytes]:
        """Load blocks as vLLM does, each when it is a hit, up to the first miss; return the loaded ones."""
        row_of = dict(zip(keys, rows, strict=True))
        running: dict[int, list[bytes]] = {}
        loaded: set[bytes] = set()

        def ended() -> bool:
            for number in [number for number in running if number in self.results]:
                result, wanted = self.results[number], running.pop(number)
                loaded.update(wanted if result.success else result.successful_keys)
            busy = {key for wanted in running.values() for key in wanted}
            hits: list[bytes] = []
            waits = bool(busy)
            for key in keys:
                if key in loaded or key in busy:
                    continue
                answer = self.tier.lookup(key, ctx).name
                if answer == "MISS":
                    break
                waits = True
                if answer == "HIT":
                    hits.append(key)
            if hits:
                running[self.submit(hits, [row_of[key] for key in hits], ctx, load=True)] = hits
            return not waits

        self.until(ended)
        return [key for key in keys if key in loaded]
