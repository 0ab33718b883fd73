"""Whatever a tier answers, the step goes on, and the tier is left out with one clear line in the log."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_STORAGE, OffloadingEvent
from tiering.api.request import OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.errors import ConfigError
from tiering.secondary.contract import JobResult, PrefixAnswer, StepEnd, TransferJob
from tiering.secondary.tier_stats import TierStats
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(4))
NAN = float("nan")


class Panic(BaseException):
    """An error outside of ``Exception``, as libraries in other languages raise."""


class Endless(list[Any]):
    """A list whose iterator never ends."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(K[0])


class Unprintable:
    """An object that raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise Panic("no text")

    def __bool__(self) -> bool:
        raise Panic("no truth")

    def __len__(self) -> int:
        raise Panic("no length")

    def __eq__(self, other: object) -> bool:
        raise Panic("no comparison")

    __hash__ = None  # type: ignore[assignment]


Result: Callable[..., Any] = JobResult
Event: Callable[..., Any] = OffloadingEvent
Stats: Callable[..., Any] = TierStats
Policy: Callable[..., Any] = RequestOffloadingContext
End: Callable[..., Any] = StepEnd


def late() -> Iterator[object]:
    """Raise when the first element is needed."""
    raise RuntimeError("the connection is gone")
    yield


def answering(**answers: Callable[..., object]) -> FakeTier:
    """Return a fake tier that holds :data:`K`, some of whose methods are replaced."""
    tier = FakeTier("odd", held=set(K), load_deadline=5.0, settled=0.0)
    for method, answer in answers.items():
        answer.__name__ = method
        setattr(tier, method, answer)
    return tier


def use(rig: ManagerRig) -> None:
    """Call every method of the first tier, and check that the second one still serves its blocks."""
    manager, (odd, good) = rig.manager, rig.tiers
    assert isinstance(odd, FakeTier)
    assert isinstance(good, FakeTier)
    manager.open_tier(0, rig.clock() + 1.0)
    ctx = rig.request("r2")
    manager.match_prefix(K, ctx)
    rig.step()
    good.finish_all()
    odd.finish_all()
    rig.step()
    manager.on_request_finished(ctx)
    ctx = rig.request("r3")
    manager.match_prefix(K, ctx)
    rig.step()
    good.finish_all()
    odd.finish_all()
    assert manager.match_prefix(K, ctx) == (4, False), "one of the tiers has delivered the blocks"
    manager.prepare_load(K, ctx)
    manager.complete_load(K, ctx)
    manager.touch(K, ctx)
    manager.touch(K, ctx, used=False)
    manager.prepare_store(keys_of(10, 11), ctx)
    manager.complete_store(keys_of(10, 11), ctx)
    for tier in (odd, good):
        for job in list(tier.stores):
            tier.finish(job, success=False)
    rig.step()
    manager.touch(keys_of(10, 11), ctx)
    manager.take_events()
    manager.get_stats()
    manager.on_request_finished(ctx)
    odd.resets = False
    manager.reset_cache()
    rig.step()
    good.has_successor = True
    rig.step()
    manager.has_pending_work()
    manager.shutdown()


NOT_TRUE: list[object] = [None, 1, "yes", NAN, [], np.array([True, True]), Unprintable()]

NOT_KEYS: list[object] = [None, 7, b"one key", "text", [[]], late(), itertools.repeat(K[0]), Unprintable()]

WRONG: dict[str, list[object]] = {
    "lookup_prefix": [
        None, 7, "text", (1,), (1, False, 0), (-1, False), (5, False), (10**400, False), (1.0, False), (NAN, False),
        ("1", False), (None, False), (1, None), (1, 0), (Unprintable(), False), Unprintable(), late(),
        itertools.repeat(1), np.array([1, 2, 3]),
    ],
    "on_new_request": [
        None, 7, OffloadPolicy.REQUEST_LEVEL, Policy("request_level"), Unprintable(),
    ],
    "used": [None, "1", NAN, -1.0, 10**400, 1j, np.array([1.0, 2.0]), Unprintable()],
    "on_schedule_end": [
        7, (), ((), 0.0, False, False), "text", Unprintable(),
        *map(End, NOT_KEYS),
        *(End(rest=rest) for rest in (None, "1", NAN, -1.0, 10**400, 1j, Unprintable())),
        *(End(superseded=answer) for answer in NOT_TRUE),
        *(End(reset_done=answer, wanted=K[:1]) for answer in NOT_TRUE),
    ],
    "open": NOT_TRUE,
    "reset": NOT_TRUE,
    "shutdown": NOT_TRUE,
    "take_events": [
        [None], [Unprintable()], itertools.repeat(7), "text",
        itertools.repeat(Event(K, MEDIUM_STORAGE, LOCAL, "odd", False)),
        [Event(None, MEDIUM_STORAGE, LOCAL, "odd", False)],
        [Event([7], MEDIUM_STORAGE, LOCAL, "odd", False)],
        [Event(K, "TAPE", LOCAL, "odd", False)],
        [Event(K, MEDIUM_STORAGE, "", "odd", False)],
        [Event(K, MEDIUM_STORAGE, LOCAL, "another", False)],
        [Event(K, MEDIUM_STORAGE, LOCAL, "odd", None)],
        [Event(K, MEDIUM_STORAGE, LOCAL, "odd", False, "first")],
    ],
    "get_stats": [
        None, {}, Stats(blocks="5"), Stats(blocks=NAN), Stats(hits=-1), Stats(hits=10**400),
        Stats(job_latency=[]), Stats(job_latency=None), Stats(job_latency=["1"] * 15),
        Unprintable(),
    ],
    "get_finished": [
        [None], [7], [Result(None, True)], [Result([], True)], itertools.repeat(None), [Unprintable()],
    ],
}  # fmt: skip
"""Wrong answers of each method that returns something to the manager."""


@pytest.mark.parametrize(("method", "answer"), [(method, answer) for method in WRONG for answer in WRONG[method]])
def test_a_wrong_answer_takes_the_tier_out_of_service_with_one_line(
    method: str, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ManagerRig(12, [answering(**{method: lambda *_: answer}), FakeTier("good", held=set(K))], one_thread=False)
    use(rig)
    lines = [record.getMessage() for record in caplog.records if "until a restart" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("tier odd is out of service until a restart: it")
    assert method in lines[0] or "it reported job None" in lines[0]
    assert "\n" not in lines[0]
    assert rig.stat("tiers_out_of_service") == 1
    assert rig.stat("rows_reserved") == rig.stat("rows_quarantined") == rig.stat("jobs_in_flight") == 0


METHODS = [
    "lookup", "lookup_prefix", "on_new_request", "on_request_finished", "submit_load", "submit_store", "get_finished",
    "touch", "used", "on_schedule_end", "take_events", "get_stats", "open", "reset", "drain", "shutdown",
]  # fmt: skip


def raising(error: BaseException) -> Callable[..., object]:
    def method(*_: object) -> object:
        raise error

    return method


@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("broken"), RecursionError()], ids=repr)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_raises_takes_the_tier_out_of_service_with_one_line(
    method: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ManagerRig(12, [answering(**{method: raising(error)}), FakeTier("good", held=set(K))])
    use(rig)
    (line,) = [record.getMessage() for record in caplog.records if "until a restart" in record.getMessage()]
    assert line.endswith(f"raised {error!r}")
    if method in ("submit_load", "submit_store"):
        assert rig.stat("jobs_in_flight") > 0, "perhaps the tier uses the rows"
    else:
        assert rig.stat("rows_reserved") == rig.stat("rows_quarantined") == rig.stat("jobs_in_flight") == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=repr)
@pytest.mark.parametrize("method", METHODS)
def test_an_exception_that_ends_the_process_passes_through(method: str, error: BaseException) -> None:
    with pytest.raises(type(error)):
        use(ManagerRig(12, [answering(**{method: raising(error)}), FakeTier("good", held=set(K))]))


@pytest.mark.parametrize("answer", [1, "yes", NAN, Unprintable()], ids=["number", "text", "nan", "unprintable"])
def test_a_lookup_that_answers_something_else_is_no_miss_in_silence(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    rig = ManagerRig(12, [answering(lookup=lambda *_: answer), FakeTier("good", held=set(K))])
    use(rig)
    assert "its lookup_prefix raised TypeError" in caplog.text
    assert rig.stat("tiers_out_of_service") == 1


def test_a_tier_may_answer_with_values_of_numpy() -> None:
    class NumpyTier(FakeTier):
        def lookup(self, key: OffloadKey, req_context: ReqContext) -> Any:
            return np.bool_(key in self.held)

        def used(self, keys: Any, req_context: ReqContext) -> Any:
            return np.float32(3.0)

        def on_schedule_end(self) -> Any:
            return StepEnd((), np.float32(0.0), np.False_, np.False_)  # type: ignore[arg-type]

        def get_stats(self) -> Any:
            return TierStats(blocks=np.int64(4), read_seconds=np.float64(0.5), job_latency=np.ones(15, np.int64))  # type: ignore[arg-type]

        def get_finished(self) -> Any:
            return (JobResult(np.int64(one.job_id), np.bool_(one.success)) for one in super().get_finished())  # type: ignore[arg-type]

    tier = NumpyTier("odd", held=set(K))
    rig = ManagerRig(12, [tier, FakeTier("good")])
    assert rig.manager.match_prefix(K, rig.ctx) == (4, True)
    rig.step()
    tier.finish_all()
    assert rig.manager.match_prefix(K, rig.ctx) == (4, False)
    rig.manager.touch(K, rig.ctx)
    fields = rig.manager.get_stats()["tiers"]["odd"]
    assert {type(value) for value in fields.values()} == {int, float, list}
    assert {type(value) for value in fields["job_latency"]} == {int}
    assert (fields["blocks"], fields["read_seconds"]) == (4, 0.5)
    assert rig.stat("tiers_out_of_service") == 0


def test_a_list_of_keys_whose_iterator_never_ends_does_not_hold_the_step() -> None:
    rig = ManagerRig(12, [answering(on_schedule_end=lambda: StepEnd(Endless(K)))])
    rig.step()
    assert rig.stat("jobs_in_flight") == 0


def test_numpy_answers_of_a_prefix_lookup_are_understood() -> None:
    tier = answering(lookup_prefix=lambda keys, ctx: PrefixAnswer(np.int64(len(keys)), np.False_))  # type: ignore[arg-type]
    rig = ManagerRig(12, [tier])
    assert rig.manager.match_prefix(K, rig.ctx) == (4, True)


class Results(FakeTier):
    """A fake tier that returns ``odd`` once, after its own results."""

    odd: Callable[[], list[Any]] | None = None

    def get_finished(self) -> Any:
        odd, self.odd = self.odd, None
        return [*super().get_finished(), *(odd() if odd is not None else ())]


@pytest.mark.parametrize(
    "result",
    [
        lambda job: Result(job.job_id, None),
        lambda job: Result(job.job_id, "failed"),
        lambda job: Result(job.job_id, 1),
        lambda job: Result(job.job_id, True, keys_of(77)),
        lambda job: Result(job.job_id, True, [*K, *keys_of(77)]),
        lambda job: Result(job.job_id, True, K[0]),
        lambda job: Result(job.job_id, True, 7),
        lambda job: Result(job.job_id, True, late()),
        lambda job: Result(job.job_id, True, [None]),
        lambda job: Result(job.job_id + 1, True),
        lambda job: Result(NAN, True),
        lambda job: (job.job_id, True),
    ],
    ids=[
        "none", "text", "number", "another key", "more keys", "one key", "no keys", "late", "none as a key",
        "a job it never got", "nan", "a pair",
    ],
)  # fmt: skip
def test_a_wrong_result_of_a_load_makes_nothing_readable_and_releases_no_row(
    result: Callable[[TransferJob], Any], caplog: pytest.LogCaptureFixture
) -> None:
    tier = Results("odd", held=set(K))
    rig = ManagerRig(12, [tier])
    rig.manager.match_prefix(K, rig.ctx)
    rig.step()
    job = tier.loads[0]
    tier.odd = lambda: [result(job)]
    rig.step()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "its get_finished returned" in line or "it reported job" in line
    assert rig.manager.match_prefix(K, rig.ctx) == (0, False)
    assert (rig.stat("jobs_in_flight"), rig.stat("rows_quarantined"), rig.stat("misreported_jobs")) == (1, 4, 1)
    tier.finish(job)
    rig.step()
    assert (rig.stat("jobs_in_flight"), rig.stat("rows_quarantined")) == (0, 0), "the result that is right counts"
    assert rig.manager.match_prefix(K, rig.ctx) == (0, False)


def test_a_tier_cannot_change_the_keys_of_a_lookup() -> None:
    def clear(keys: list[OffloadKey], ctx: ReqContext) -> PrefixAnswer:
        keys.clear()
        return PrefixAnswer(0, False)

    prompt = list(K)
    ManagerRig(12, [answering(lookup_prefix=clear)]).manager.match_prefix(prompt, ReqContext("r1"))
    assert prompt == K


def test_a_tier_cannot_change_the_keys_and_rows_of_a_job() -> None:
    """The manager, the other tiers and the engine use the same keys and rows."""

    class ChangingTier(FakeTier):
        def submit_load(self, job: TransferJob) -> None:
            super().submit_load(job)
            with pytest.raises(AttributeError):
                job.keys.reverse()  # type: ignore[attr-defined]
            with pytest.raises(ValueError, match="read-only"):
                job.block_ids.sort()

        submit_store = submit_load

    keys, tier = list(K), ChangingTier("odd", held=set(K))
    rig = ManagerRig(12, [tier])
    rig.manager.match_prefix(keys, rig.ctx)
    rig.step()
    output = rig.manager.prepare_store(keys_of(10, 11), rig.ctx)
    assert output is not None
    rig.manager.complete_store(keys_of(10, 11), rig.ctx)
    assert [len(job.keys) for job in tier.loads] == [4, 2]
    assert output.store_spec.block_ids.flags.writeable, "the engine's own rows are as they were"
    for method in ("touch", "used"):
        changing = answering(**{method: lambda keys, *_: keys.reverse()})
        rig = ManagerRig(12, [changing])
        rig.manager.prepare_store(keys, rig.ctx)
        rig.manager.complete_store(keys, rig.ctx)
        changing.finish(changing.stores[0], success=False)
        rig.step()
        rig.manager.touch(keys, rig.ctx)
        rig.manager.touch(keys, rig.ctx, used=False)
        assert keys == list(K)
        assert rig.stat("tiers_out_of_service") == 1


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("name", None), ("medium", 7), ("load_deadline", -1.0), ("load_deadline", NAN), ("load_deadline", "30s"),
        ("store_deadline", 0.0), ("primary_share", 1.5), ("primary_share", NAN), ("max_load_blocks", 0),
        ("max_load_blocks", 2.0), ("min_prefix_blocks", 0), ("min_prefix_blocks", None), ("fill", "no"), ("intake", 7),
    ],
)  # fmt: skip
def test_a_wrong_attribute_is_an_error_at_the_start_that_names_it(attribute: str, value: object) -> None:
    tier = FakeTier()
    if attribute == "name":
        setattr(tier, attribute, value)
    else:
        changed: dict[str, Any] = {attribute: value}
        tier.traits = replace(tier.traits, **changed)
    with pytest.raises(ConfigError, match=f"its attribute {attribute} is .*, but must be"):
        ManagerRig(4, [tier])
