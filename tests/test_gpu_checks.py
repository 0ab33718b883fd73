"""A dry run of the checks for GPU machines: without a GPU, their report never says passed."""

from __future__ import annotations

import io
import signal
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import connectors, copies, engines, servers
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.checks import Check, NotHereError, Outcome, exit_code, require, run_checks, summary
from benchmarks.gpu.machine import Machine, dry_machine
from benchmarks.vllm_overhead_engine import Answered, Load
from tests.copy.fake_cuda import FakeCuda
from tests.vllm.rig import Answer
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.host import Direction
from tiering.copy.layout import GroupPages
from tiering.primary.memory.region import shared_path

ANSWERS = [Answer([1, 2, 3], [0.0] * 3)]


def test_a_dry_run_runs_every_check_of_copies_and_calls_none_passed() -> None:
    out = io.StringIO()
    assert main(["--dry"], out) == 2
    report = out.getvalue()
    ends = [line.split()[0] for line in report.splitlines()[1:-1] if not line.startswith("          ")]
    here = len(copies.CHECKS) + len(engines.CHECKS)
    assert ends[:here] == ["dry"] * here
    assert set(ends[here:]) == {"left"}
    assert "passed" not in report
    assert report.splitlines()[-1].endswith("no GPU: nothing that only a GPU can show has been checked")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_the_command_says_so() -> None:
    out = io.StringIO()
    assert main([], out) == 2
    assert "no GPU" in out.getvalue()


def defective(fake: FakeCuda) -> Machine:
    machine = dry_machine()
    return replace(machine, api=fake, watched=fake.watched, batch=None)


def outcome(name: str, machine: Machine) -> tuple[Outcome, str]:
    (check,) = [check for check in copies.CHECKS if check.name == name]
    (result,) = run_checks([check], machine, io.StringIO())
    return result.outcome, result.detail


def test_rows_that_cannot_be_pinned_fail_the_check() -> None:
    fake = FakeCuda(checks_order=False)
    fake.runtime.code = 2
    assert outcome("pinning", defective(fake))[0] is Outcome.FAILED


def test_an_error_that_is_left_behind_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.copy.cudart.HostRegistration._take_error", lambda self: None)
    end, detail = outcome("errors", dry_machine())
    assert end is Outcome.FAILED
    assert "712" in detail


@pytest.mark.parametrize("name", ["layouts", "order", "offsets", "stages"])
def test_copies_that_move_nothing_fail_the_check(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    reuse_staging_buffers(monkeypatch)
    assert outcome(name, dry_machine())[0] is Outcome.DRY
    monkeypatch.setattr(CudaCopyHandler, "_move_rows", lambda self, pages, group, staging: None)
    queue = CudaCopyHandler._queue

    def queue_nothing(handler: CudaCopyHandler, pages: GroupPages, places: torch.Tensor, kernels: object) -> object:
        if handler._is_direct(pages.group):  # the kernel moves the rows as well
            handler._kernel = lambda *_, **__: None
        return queue(handler, pages, places, kernels)  # type: ignore[arg-type]

    monkeypatch.setattr(CudaCopyHandler, "_queue", queue_nothing)
    assert outcome(name, dry_machine())[0] is Outcome.FAILED


def reuse_staging_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads begin with what the stores before them have left in their buffer, as an allocator may."""
    allocate = CudaCopyHandler._allocate_staging
    stores: defaultdict[int, list[list[torch.Tensor]]] = defaultdict(list)

    def allocate_again(handler: CudaCopyHandler) -> list[torch.Tensor]:
        halves = allocate(handler)
        same_size = stores[halves[0].nbytes]
        if handler._direction is Direction.STORE:
            same_size.append(halves)
            return halves
        return same_size[-2] if len(same_size) > 1 else halves

    monkeypatch.setattr(CudaCopyHandler, "_allocate_staging", allocate_again)


def test_memory_that_grows_fails_the_check() -> None:
    sizes = iter([0, 64 << 20])
    end, detail = outcome("memory", replace(dry_machine(), reserved=lambda: next(sizes)))
    assert (end, "64 MiB" in detail) == (Outcome.FAILED, True)


def test_a_gpu_that_misses_the_rates_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_bare_rate", lambda machine, nbytes: {"store": 1e9, "load": 1e9})
    monkeypatch.setattr(copies, "_products", lambda machine: nullcontext(lambda: ""))
    end, detail = outcome("rates", replace(dry_machine(), is_gpu=True))
    assert end is Outcome.FAILED
    assert "the goal is 0.95 of a bare copy" in detail
    assert "the goal is 0.8 of a bare copy" in detail


def test_only_a_gpu_on_which_all_checks_pass_ends_with_zero() -> None:
    def missing(machine: Machine) -> str:
        raise NotHereError("no vLLM")

    def wrong(machine: Machine) -> str:
        require(False, "bytes differ")
        return ""

    good, left_out, bad = (
        Check(name, "it holds", run) for name, run in (("a", lambda machine: "fine"), ("b", missing), ("c", wrong))
    )
    on_gpu = replace(dry_machine(), is_gpu=True, name="H100")
    out = io.StringIO()
    assert exit_code(run_checks([good], on_gpu, out)) == 0
    assert exit_code(run_checks([good], dry_machine(), out)) == 2
    assert exit_code(run_checks([good, left_out], on_gpu, out)) == 2
    results = run_checks([bad, left_out, good], on_gpu, out)
    assert exit_code(results) == 1
    assert summary(results, on_gpu) == "1 passed, 1 FAILED, 1 left out on H100"
    assert "bytes differ" in results[0].detail


def test_servers_are_judged_by_answers_loads_and_latency() -> None:
    bare, slow = [0.010] * 100, [0.0115] * 100
    assert "all answers equal" in servers.judge(ANSWERS, ANSWERS, ANSWERS, 1e6, bare, bare)
    other = [Answer([1, 2, 4], [0.0] * 3)]
    for arguments, problem in (
        ((ANSWERS, other, ANSWERS, 1e6, bare, bare), r"\[0\] differ with stores"),
        ((ANSWERS, ANSWERS, other, 1e6, bare, bare), r"\[0\] differ with loads"),
        ((ANSWERS, ANSWERS, ANSWERS, 0, bare, bare), "nothing was loaded"),
        ((ANSWERS, ANSWERS, ANSWERS, 1e6, bare, slow), "1.15 times as long"),
    ):
        with pytest.raises(AssertionError, match=problem):
            servers.judge(*arguments)


def test_every_feature_that_touches_kv_has_a_server() -> None:
    text = " ".join(f"{variant.name} {variant.model} {variant.options}" for variant in servers.VARIANTS)
    for word in ("first runner", "second runner", "CUDA graphs", "async-scheduling", "speculative", "fp8", "gemma"):
        assert word in text


def test_left_over_shared_memory_is_found_and_that_of_other_servers_does_not_count() -> None:
    engine_id = f"test-{uuid.uuid4()}"
    own, others = shared_path(engine_id), shared_path(f"other-{engine_id}")
    for path in (own, others):
        path.touch()
    try:
        assert servers.shared_files(engine_id) == [own.name]
    finally:
        own.unlink()
        others.unlink()


class Killed:
    """A server that is killed at its first token, while another server starts."""

    def stream(self, prompts: Sequence[list[int]], max_tokens: int) -> Iterator[list[Answer]]:
        return iter([ANSWERS])

    def end(self, with_signal: signal.Signals) -> None:
        assert with_signal is signal.SIGKILL


def test_a_server_that_starts_beside_a_kill_does_not_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = shared_path(f"beside-{uuid.uuid4()}")
    seconds = iter(range(0, 1_000_000, 100))
    monkeypatch.setattr("tests.vllm.server.time.monotonic", lambda: float(next(seconds)))

    @contextmanager
    def serve(*_: object, **__: str) -> Iterator[Killed]:
        beside.touch()
        yield Killed()

    monkeypatch.setattr(servers, "serve", serve)
    monkeypatch.setattr(servers, "_needs_vllm", lambda machine: None)
    monkeypatch.setattr(servers, "write_llama", lambda path: path)
    try:
        assert "no shared memory" in servers.kills(dry_machine())
    finally:
        beside.unlink()


class Served:
    """The pipe to an engine that serves ``missing`` tokens less from its tiers than a prompt has."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.seen: set[tuple[int, ...]] = set()
        self.answer: Answered | bool = True

    def send(self, order: Load | str) -> None:
        self.answer = True
        if isinstance(order, Load):
            cached = order.length - self.missing if order.seeds in self.seen else 0
            self.seen.add(order.seeds)
            count = len(order.seeds)
            each = [0.02] * count, [cached] * count, [[1]] * count
            self.answer = Answered(0.1, 0.2, 0.0, 0.0, 0.0, 0.0, 0.5, 1, 1, *each)

    def poll(self, timeout: float) -> bool:
        return True

    def recv(self) -> Answered | bool:
        return self.answer


def test_our_connector_is_judged_by_the_tokens_that_come_back() -> None:
    pipes = {name: Served(connectors.BLOCK) for name in (connectors.NONE, connectors.OFFLOADING, connectors.LOCAL)}
    answered = connectors.one_round(1, pipes)  # type: ignore[arg-type]
    assert "small, tier" not in answered[connectors.NONE]
    assert {"long, tier", "long, disk"} <= answered[connectors.LOCAL].keys()
    title, *lines = connectors.table([answered], layers=32)
    assert "32 layers" in title
    assert [line.split(" | ")[0].strip() for line in lines] == sorted(pipes)
    assert lines[1].split(" | ")[8] == f"{16384 * 4096 * 32 / 20e6:.1f}"
    with pytest.raises(AssertionError, match="small: "):
        connectors.turn(connectors.CPU, Served(connectors.BLOCK + 1), 0)  # type: ignore[arg-type]
    connectors.turn(connectors.OFFLOADING, Served(connectors.BLOCK + 1), 0)  # type: ignore[arg-type]


def test_fewer_layers_are_taken_where_the_gpu_is_small() -> None:
    with pytest.raises(NotHereError):
        connectors.layers_for(dry_machine(), 6)
    assert connectors.layers_that_fit(138 << 30, 6) == 32
    assert connectors.layers_that_fit(78 << 30, 6) == 17
    assert connectors.layers_that_fit(8 << 30, 6) == 2
