"""Canonical blocks of engines with one and two workers that run at the same time over one bucket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.fake_s3 import fake_s3
from tests.vllm.rig import Answer, answers_without_tiers, engine, whole_blocks, wrong
from tests.vllm.server import Server, until
from tests.vllm.test_canonical_rows import ALL, FIRST, SECOND, negative_control, step, stored, workers

pytestmark = pytest.mark.slow

THIRD = [[*FIRST[0][:96], *SECOND[0]], [*SECOND[1][:96], *FIRST[1]]]
"""Prompts with a beginning that one engine has computed, and an end that the other one has."""


def beside(server: Server, prompts: list[list[int]], action: Callable[[], Any]) -> tuple[list[Answer], Any]:
    """Return the server's answers to ``prompts``, and the result of ``action``, which runs meanwhile."""
    answers: list[Answer] = []
    asking = Thread(target=lambda: answers.extend(server.ask(prompts)))
    asking.start()
    try:
        return answers, action()
    finally:
        asking.join()


def test_engines_of_one_and_two_workers_serve_each_other_while_both_run(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (answers_without_tiers(llama, prompts) for prompts in (FIRST, SECOND, THIRD))
    with fake_s3() as bucket:
        for name, value in bucket.environment().items():
            monkeypatch.setenv(name, value)
        tier = {"type": "s3", "bucket": bucket.bucket, "prefix": "kv/", "endpoint_url": bucket.endpoint, "ttl": "1d"}
        words = {
            "primary": {"capacity": "64MiB"},
            "secondary": [{**tier, "lookup_deadline": "1m"}],
            "layout": "canonical",
        }
        with workers(llama, tmp_path, 2, words=words, tier="s3") as two, engine(llama, words) as one:
            theirs, own = beside(two, SECOND, lambda: one.ask(FIRST))
            assert wrong(own, first) == wrong(theirs, second) == []
            one.settle()
            until(lambda: stored(two, "s3") >= whole_blocks(SECOND), 60, "the stores of two workers")
            one.evict()
            two.evict()
            step(two)
            before = two.loaded()
            theirs, (own, loaded) = beside(two, FIRST, lambda: one.loaded(lambda: one.ask(SECOND)))
            assert wrong(own, second) == wrong(theirs, first) == []
            step(two)
            assert loaded == two.loaded() - before == ALL, "all whole blocks came from the other engine"
            theirs, own = beside(two, THIRD, lambda: one.ask(THIRD))
            assert wrong(own, third) == wrong(theirs, third) == []
            negative_control(one, second)
