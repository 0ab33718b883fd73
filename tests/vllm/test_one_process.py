"""Scheduler and worker in one process, CPU memory only: evicted blocks return, outputs stay the same.

All tests run in the tiering mode and in both modes of the simple scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing, EndsAtOnce, EndsWhenLookedAt, FailEverySecond, OneWrongBlock
from tests.vllm.rig import BLOCK, BLOCK_BYTES, NUM_BLOCKS, Answer, Engine, engine, prompt, whole_blocks, wrong
from tests.wrapped_handler import Wrapped

PROMPTS = [prompt(seed) for seed in range(4)]
LONG = [prompt(20, 560)]
WHOLE = [prompt(30, 6 * BLOCK)]
LATER = [prompt(seed) for seed in range(40, 44)]
MANY = [prompt(seed, 130) for seed in range(50, 58)]
NEW = [prompt(seed) for seed in range(60, 62)]
LENGTHY = 60
"""Tokens to generate for ``MANY``, so that not all of these requests fit at once."""


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[str, list[Answer]]:
    short = PROMPTS + LONG + WHOLE + LATER
    with engine(llama, None, enable_prefix_caching=False) as plain:
        answers = plain.ask(short)
        many = plain.ask(MANY, LENGTHY)
        changed = plain.ask([[(PROMPTS[0][0] + 1) % 512, *PROMPTS[0][1:]]])
    cuts = iter(answers)
    named = {
        name: [next(cuts) for _ in prompts]
        for name, prompts in [("prompts", PROMPTS), ("long", LONG), ("whole", WHOLE), ("later", LATER)]
    }
    return {**named, "many": many, "changed": changed}


MODES: dict[str, dict[str, Any]] = {
    "tiering": {},
    "eager": {"mode": "simple"},
    "lazy": {"mode": "simple", "lazy_offload": True},
}


@pytest.fixture(scope="module", params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tiered(llama: Path, expected: dict[str, list[Answer]], mode: str) -> Iterator[Engine]:
    with engine(llama, {"primary": {"capacity": "64MiB"}, **MODES[mode]}) as running:
        yield running
        running.settle()
        assert running.free_blocks() == NUM_BLOCKS - 1


def test_the_models_output_depends_on_its_whole_context(expected: dict[str, list[Answer]]) -> None:
    assert not expected["changed"][0].matches(expected["prompts"][0])


def test_evicted_from_the_gpu_and_back_from_the_cpu(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    assert wrong(tiered.ask(PROMPTS), expected["prompts"]) == []
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: tiered.ask(PROMPTS))
    assert wrong(answers, expected["prompts"]) == []
    assert loaded == whole_blocks(PROMPTS) * BLOCK_BYTES


@pytest.mark.parametrize("lie", [CopyNothing, OneWrongBlock])
def test_negative_control_what_was_not_loaded_rightly_shows(
    tiered: Engine, expected: dict[str, list[Answer]], lie: Any
) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    with tiered.loads_through(lie):
        answers = tiered.ask(PROMPTS, params={"kv_tiering": {"store": False}})
    assert wrong(answers, expected["prompts"]) == [0, 1, 2, 3]
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected["prompts"]) == []


def test_a_prompt_that_is_held_whole(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    tiered.ask(WHOLE)
    tiered.evict()
    steps = len(tiered.scheduled)
    answers, loaded = tiered.loaded(lambda: tiered.ask(WHOLE))
    assert wrong(answers, expected["whole"]) == []
    assert loaded == 6 * BLOCK_BYTES
    assert max(tiered.scheduled[steps:]) == 1


def test_prefill_in_chunks_is_stored_and_loaded(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    steps = len(tiered.scheduled)
    assert wrong(tiered.ask(LONG), expected["long"]) == []
    assert tiered.scheduled[steps : steps + 3] == [256, 256, 48]
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: tiered.ask(LONG))
    assert wrong(answers, expected["long"]) == []
    assert loaded == whole_blocks(LONG) * BLOCK_BYTES


def test_preempted_requests_store_and_load(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    loaded = 0
    for _ in range(2):
        before = tiered.preempted
        answers, moved = tiered.loaded(lambda: tiered.ask(MANY, LENGTHY))
        assert wrong(answers, expected["many"]) == []
        assert tiered.preempted > before
        loaded += moved
        tiered.evict()
    assert loaded > whole_blocks(MANY) * BLOCK_BYTES // 2


def test_a_copy_that_fails_is_recomputed(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    with tiered.loads_through(FailEverySecond) as handler:
        answers = tiered.ask(PROMPTS)
        assert wrong(answers, expected["prompts"]) == []
        assert handler.failed > 0
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected["prompts"]) == []


def test_a_load_starts_before_the_model_of_its_step_runs(
    tiered: Engine, expected: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is then computed in the next step, although vLLM starts loads behind the model."""
    tiered.ask(PROMPTS)
    tiered.evict()
    busy = tiered.start([LATER[0]], 40)
    tiered.step()
    runner = tiered.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    run, begun = runner._model_forward, list[int]()
    with tiered.loads_through(EndsAtOnce) as handler:

        def forward(*args: Any, **words: Any) -> Any:
            begun.append(handler.begun)
            return run(*args, **words)

        monkeypatch.setattr(runner, "_model_forward", forward)
        names = tiered.start(PROMPTS[:1])
        tiered.step()
        assert begun == [1]
        steps = len(tiered.scheduled)
        tiered.step()
        assert tiered.scheduled[steps:] == [1 + len(PROMPTS[0]) % BLOCK]
        assert wrong(tiered.finish([*busy, *names])[1:], expected["prompts"][:1]) == []


def test_a_request_whose_load_fails_ends_with_an_error_if_that_is_the_policy(
    tiered: Engine, expected: dict[str, list[Answer]], mode: str
) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    tiered.scheduler.recompute_kv_load_failures = False
    try:
        with tiered.loads_through(FailEverySecond) as handler:
            answers = tiered.ask(PROMPTS)
            assert handler.failed > 0
    finally:
        tiered.scheduler.recompute_kv_load_failures = True
    failed = [number for number, answer in enumerate(answers) if not answer.tokens]
    assert (
        len(failed) == handler.failed if mode == "tiering" else len(failed) >= handler.failed
    )  # one load may serve several requests
    assert set(wrong(answers, expected["prompts"])) == set(failed)
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected["prompts"]) == []


def test_an_engine_inside_this_process_waits_for_a_load_instead_of_spinning(
    tiered: Engine, expected: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.engines.vllm.worker_side.LOAD_PATIENCE", 60.0)
    tiered.ask(WHOLE)
    tiered.evict()
    steps = len(tiered.scheduled)
    with tiered.loads_through(EndsWhenLookedAt):
        assert wrong(tiered.ask(WHOLE), expected["whole"]) == []
    assert tiered.scheduled[steps] == 0
    # With asynchronous scheduling, as on GPUs, a second step is ordered before the first one has waited.
    assert any(tiered.scheduled[steps + 1 : steps + 3])


def test_requests_aborted_while_they_load(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    from vllm import SamplingParams

    tiered.ask(LATER)
    tiered.evict()
    core = tiered.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    for number, tokens in enumerate(LATER):
        core.add_request(f"aborted-{number}", {"prompt_token_ids": tokens}, sampling)
    with tiered.loads_through(Wrapped):
        core.step()
        waiting = [request.status.name for request in tiered.scheduler.requests.values()]
        core.abort_request([f"aborted-{number}" for number in range(len(LATER))])
        while core.has_unfinished_requests():
            core.step()
        tiered.settle()
    assert "WAITING_FOR_REMOTE_KVS" in waiting
    assert not tiered.scheduler.requests
    assert tiered.free_blocks() == NUM_BLOCKS - 1
    assert wrong(tiered.ask(LATER), expected["later"]) == []


def converse(running: Engine, chunks: Sequence[list[int]], max_tokens: int) -> list[int]:
    """Run a streaming session, in which each chunk is answered before the next one comes.

    Returns:
        The whole prompt at the end of the session.
    """
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    core = running.llm.llm_engine.engine_core.engine_core
    for chunk in [*chunks, None]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True)
        words = EngineCoreRequest(
            "session", list(chunk or [0]), None, sampling, None, 0.0, None, None, None, resumable=chunk is not None
        )
        if chunk is None:
            prompt_tokens = list(running.scheduler.requests["session"].prompt_token_ids)
        core.add_request(*core.preprocess_add_request(words))
        while "session" in running.scheduler.requests and (
            running.scheduler.requests["session"].status.name != "WAITING_FOR_STREAMING_REQ"
        ):
            running.llm.llm_engine.step()
    running.settle()
    return prompt_tokens


def test_all_of_a_streaming_session_is_stored(tiered: Engine, mode: str) -> None:
    """Each chunk discards the last sampled token; here this token had just filled a block."""
    words = [prompt(60, 3 * BLOCK - 4), prompt(61, 2 * BLOCK), prompt(62, 2 * BLOCK + 8)]
    whole = converse(tiered, words, 4)
    assert len(whole) == sum(map(len, words)) + 2 * 3
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: tiered.ask([whole]))
    if mode != "lazy":  # the lazy mode stores only blocks that are about to leave the GPU
        assert loaded == whole_blocks([whole]) * BLOCK_BYTES
    tiered.settle()
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    assert wrong(answers, tiered.ask([whole])) == []


def test_requests_may_ask_for_no_tiers(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: tiered.ask(PROMPTS, params={"kv_tiering": {"load": False}}))
    assert wrong(answers, expected["prompts"]) == []
    assert loaded == 0


def test_a_reset_forgets_the_cpu_tier_only_if_asked_to(tiered: Engine, expected: dict[str, list[Answer]]) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    assert tiered.llm.reset_prefix_cache()
    assert tiered.loaded(lambda: tiered.ask(PROMPTS))[1] > 0
    tiered.settle()
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    answers, loaded = tiered.loaded(lambda: tiered.ask(PROMPTS))
    assert wrong(answers, expected["prompts"]) == []
    assert loaded == 0
    tiered.settle()
    assert tiered.llm.reset_prefix_cache(reset_connector=True)


def test_a_medium_that_has_not_confirmed_a_reset_does_not_fail_it(
    tiered: Engine, expected: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure would leave vLLM paused, and break a weight sync because of an unreachable cache."""
    half = tiered.connector.scheduler_half
    reset_cache = half.reset_cache
    monkeypatch.setattr(half, "reset_cache", lambda: reset_cache() and False)
    tiered.ask(PROMPTS)
    tiered.settle()
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    answers, loaded = tiered.loaded(lambda: tiered.ask(PROMPTS))
    assert wrong(answers, expected["prompts"]) == []
    assert loaded == 0


@contextmanager
def other_weights(running: Engine) -> Iterator[None]:
    """Run with changed weights, as after a step of training."""
    worker = running.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    weights = dict(worker.get_model().named_parameters())["model.layers.0.input_layernorm.weight"]
    before = weights.detach().clone()
    try:
        weights.data.mul_(1.5)
        yield
    finally:
        weights.data.copy_(before)


def ask_beside(running: Engine, prompts: Sequence[list[int]]) -> None:
    """Ask ``prompts`` while other requests run, and wait only for the answers to ``prompts``."""
    from vllm import SamplingParams

    core = running.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
    for number, tokens in enumerate(prompts):
        core.add_request(f"beside-{number}", {"prompt_token_ids": tokens}, sampling)
    left = len(prompts)
    while left:
        ended = [output.request_id for output in core.step() if output.finished]
        assert "busy" not in ended
        left -= len(ended)


def test_a_reset_that_the_engine_refuses_by_half_serves_nothing_from_before_it(tiered: Engine) -> None:
    """While a request runs, the tiers are reset but the engine's own cache still serves old blocks."""
    from vllm import SamplingParams

    core = tiered.llm.llm_engine
    before = tiered.ask(PROMPTS)
    busy = SamplingParams(temperature=0, max_tokens=400, detokenize=False, ignore_eos=True)
    core.add_request("busy", {"prompt_token_ids": prompt(70, 40)}, busy)
    core.step()
    longer = [[*tokens, *prompt(71, 60)] for tokens in PROMPTS[:2]]
    with other_weights(tiered):
        assert not tiered.llm.reset_prefix_cache(reset_connector=True)
        ask_beside(tiered, longer)
        ask_beside(tiered, NEW)
        core.abort_request(["busy"])
        while core.has_unfinished_requests():
            core.step()
        tiered.evict()
        *expected, other = tiered.ask(
            [*longer, *NEW, PROMPTS[0]], params={"kv_tiering": {"load": False, "store": False}}
        )
        assert not other.matches(before[0])
        tiered.evict()
        answers, loaded = tiered.loaded(lambda: tiered.ask(longer + NEW))
        assert wrong(answers, expected) == []
        assert loaded == whole_blocks(NEW) * BLOCK_BYTES
        tiered.evict()
        assert tiered.llm.reset_prefix_cache(reset_connector=True)
