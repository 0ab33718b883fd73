"""Beside another connector whose loads fail: neither its blocks nor blocks computed on top are stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.flaky import PARAMETER, FlakyConnector
from tests.vllm.rig import Answer, Engine, engine, prompt, transfer_config, wrong

MODES: dict[str, dict[str, Any]] = {
    "tiering": {},
    "eager": {"mode": "simple"},
    "lazy": {"mode": "simple", "lazy_offload": True},
}
PROMISED = 3
"""Number of blocks of each prompt that the other connector promises; it reports the first one."""
CASES = [(asynchronously, policy) for asynchronously in (False, True) for policy in ("recompute", "fail")]
TOKENS = 2
"""Tokens to generate. The first one depends on the prompt's KV."""
NO_TIERS = {"kv_tiering": {"load": False, "store": False}}


def prompts_of(mode: str, asynchronously: bool, policy: str) -> list[list[int]]:
    """Return three prompts that no other case uses."""
    first = 300 + 100 * list(MODES).index(mode) + 10 * CASES.index((asynchronously, policy))
    return [prompt(seed) for seed in range(first, first + 3)]


@contextmanager
def beside_a_flaky_one(model: Path, stack: dict[str, Any]) -> Iterator[tuple[Engine, FlakyConnector]]:
    """An engine with our connector and the flaky one, and the flaky one's worker half.

    The forward pass is slower than any copy: before the flaky connector reports, all copies that have begun have ended.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    other = {"kv_connector": "FlakyConnector", "kv_connector_module_path": "tests.vllm.flaky", "kv_role": "kv_both"}
    ours = {word: value for word, value in transfer_config(stack).items() if word != "kv_load_failure_policy"}
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, other]},
        "kv_load_failure_policy": "recompute",
    }
    with engine(model, None, kv_transfer_config=both) as running:
        running.connector, _ = running.scheduler.connector.sub_connectors
        running.worker, flaky = get_kv_transfer_group().sub_connectors
        running.watch()
        half = running.worker.worker_half

        def end_copies() -> None:
            half.copies.wait(set(half._jobs))

        flaky.before_reporting = end_copies
        yield running, flaky


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")


def stack_of(mode: str, directory: Path) -> dict[str, Any]:
    stack: dict[str, Any] = {"primary": {"capacity": "64MiB"}, **MODES[mode]}
    if mode == "tiering":
        stack["secondary"] = [{"type": "local", "path": str(directory), "capacity": "64MiB"}]
    return stack


@pytest.fixture(scope="module")
def said() -> dict[tuple[int, ...], Answer]:
    """The right answer to each prompt, from engines that used no tier for it."""
    return {}


class TestBesideAnother:
    """All cases of one mode share an engine and one eviction."""

    @pytest.fixture(scope="class", params=list(MODES))
    def mode(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture(scope="class")
    def beside(self, llama: Path, mode: str, directory: Path) -> Iterator[tuple[Engine, FlakyConnector]]:
        with beside_a_flaky_one(llama, stack_of(mode, directory)) as both:
            yield both

    def test_what_the_other_did_not_fill_is_not_stored(
        self, beside: tuple[Engine, FlakyConnector], mode: str, said: dict[tuple[int, ...], Answer]
    ) -> None:
        running, flaky = beside
        for asynchronously, policy in CASES:
            prompts = prompts_of(mode, asynchronously, policy)
            expected = running.ask(prompts, TOKENS, params=NO_TIERS)
            said.update({tuple(tokens): answer for tokens, answer in zip(prompts, expected, strict=True)})
            assert running.llm.reset_prefix_cache()
            failed = flaky.failed
            running.scheduler.recompute_kv_load_failures = policy == "recompute"
            answers = running.ask(
                prompts, TOKENS, params={PARAMETER: {"blocks": PROMISED, "asynchronously": asynchronously}}
            )
            running.settle()
            assert flaky.failed == failed + len(prompts)
            assert wrong(answers, expected) == ([] if policy == "recompute" else [0, 1, 2])
        running.evict()
        found = {case: running.loaded(partial(running.ask, prompts_of(mode, *case), TOKENS)) for case in CASES}
        assert {case: wrong(answers, right_of(mode, case, said)) for case, (answers, _) in found.items()} == {
            case: [] for case in CASES
        }
        assert {case for case, (_, loaded) in found.items() if loaded} == {
            case for case in CASES if case[1] == "recompute"
        }


def right_of(mode: str, case: tuple[bool, str], said: dict[tuple[int, ...], Answer]) -> list[Answer]:
    return [said[tuple(tokens)] for tokens in prompts_of(mode, *case)]


def test_nor_does_a_later_process_read_it_from_a_disk(
    llama: Path, directory: Path, said: dict[tuple[int, ...], Answer]
) -> None:
    """Our connector alone asks the tiering mode's prompts, over the same directory."""
    with engine(llama, stack_of("tiering", directory)) as alone:
        for case in CASES:
            answers, loaded = alone.loaded(partial(alone.ask, prompts_of("tiering", *case), TOKENS))
            assert wrong(answers, right_of("tiering", case, said)) == []
            assert loaded > 0  # what the first engine has computed at last
        assert alone.tier("local")["read_bytes"] > 0
