"""``kv-tiering why``: the causes of one request or of the last hour, from a running engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.runner import kv_tiering
from tests.explain.walk import explained, make_explainer
from tiering.explain.causes import REASONS, REMEDIES, MissCause, Reason
from tiering.explain.explainer import Missed
from tiering.explain.service import ExplainService
from tiering.testing.clock import FakeClock
from tiering.testing.keys import keys_of


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExplainService]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    service = ExplainService(explained("cmpl-7"), None)
    yield service
    service.stop(30)


def test_a_request_is_explained_span_by_span(engine: ExplainService) -> None:
    done = kv_tiering("why", "cmpl-7")
    assert done.code == 0
    remedies = [line for line in done.out.splitlines() if "    to do: " in line]
    lines = [line for line in done.out.splitlines() if line not in remedies]
    assert [line.split(":")[0] for line in lines[:-1]] == [
        "cmpl-7",
        "  tokens 4 to 11 (8)",
        "  tokens 12 to 19 (8)",
        "  tokens 20 to 27 (8)",
        "  tokens 28 to 29 (2)",
    ]
    assert lines[0].endswith(": 30 prompt tokens, 4 from caches, 26 computed")
    assert lines[1].endswith(": evicted from cpu, 10 min ago; 1.04 times the capacity or less would have kept them")
    assert lines[2].endswith(f": local has stored the block, and it was not loaded ({REASONS[Reason.GAP]})")
    assert lines[-1] == "  (nothing is known from before the last 10 min: the engine's start, a reset or a new epoch)"
    assert remedies[0] == "    to do: give cpu more capacity, or put a slower tier behind it"
    assert len(remedies) == 3  # nothing can be done about the end of the prompt


def test_each_cause_but_the_remainder_has_a_remedy() -> None:
    words = {one.word for one in (*MissCause, *Reason)}
    assert REMEDIES.keys() - {"unstored cpu"} == words - {"remainder", "unserved", "not_allowed", ""}


def test_what_the_remedies_name_is_documented() -> None:
    docs = "".join(path.read_text() for path in Path("docs").rglob("*.md"))
    named = {word for text in REMEDIES.values() for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text)}
    assert [word for word in sorted(named) if word not in docs] == []


def test_the_last_hour_lists_the_most_expensive_causes_first(engine: ExplainService) -> None:
    lines = kv_tiering("why", "--top").out.splitlines()
    assert lines[0] == "26 of 30 prompt tokens computed in the last hour"
    assert [line.split()[:3] for line in lines[1:-1] if "to do: " not in line] == [
        ["8", "30.8%", "evicted"],
        ["8", "30.8%", "unserved"],
        ["8", "30.8%", "diverged:"],
        ["2", "7.7%", "remainder:"],
    ]
    assert lines[1].endswith("; 1.1 times the capacity or less would have kept half of them, 1.1 times nine tenths")
    assert f"({REASONS[Reason.GAP]})" in lines[3]
    assert "to do: look at the cause of the missing block" in lines[4]


def test_a_shorter_time_is_summed_alone(tmp_path: Path) -> None:
    clock = FakeClock()
    explainer = make_explainer(clock)
    for name, tokens, seconds in (("before", 8, 900.0), ("now", 2, 0.0)):
        explainer.missed(Missed(name, tokens, 0, tokens, 0, (), None))
        explainer.started(name, 1)
        explainer.settle()
        clock.advance(seconds)
    service = ExplainService(explainer, tmp_path / "s")
    first = [
        kv_tiering("why", "--top", *words, "--socket", service.path).out.splitlines()[0]
        for words in ((), ("--minutes", "5"))
    ]
    service.stop(30)
    assert first == [
        "8 of 10 prompt tokens computed in the last hour",
        "1 of 2 prompt tokens computed in the last 5 min",
    ]
    assert kv_tiering("why", "a", "--minutes", "5").code == kv_tiering("why", "--top", "--minutes", "61").code == 2


def test_the_id_of_a_client_finds_each_prompt_and_choice(tmp_path: Path) -> None:
    explainer = make_explainer()
    for name in ("cmpl-7-0-ab", "0_cmpl-7-1-cd", "1_cmpl-7-1-cd", "cmpl-77-0-ef"):
        explainer.missed(Missed(name, 9, 0, 9, 8, keys_of(2), None))
        explainer.started(name, 0)
    service = ExplainService(explainer, tmp_path / "s")
    lines = kv_tiering("why", "cmpl-7", "--socket", service.path).out.splitlines()
    alone = kv_tiering("why", "cmpl-77", "--socket", service.path).out
    service.stop(30)
    assert lines[0].startswith("1_cmpl-7-1-cd: 9 prompt tokens")
    assert lines[-1] == "  (the same id has other prompts or choices: 0_cmpl-7-1-cd, cmpl-7-0-ab)"
    assert "the same id" not in alone


@pytest.mark.parametrize("words", [("a",), ("--top",)])
def test_new_tokens_name_what_differs_in_the_blocks_of_others(tmp_path: Path, words: tuple[str, ...]) -> None:
    explainer = make_explainer()
    explainer.missed(Missed("a", 9, 0, 9, 8, keys_of(2), None))
    explainer.started("a", 0)
    service = ExplainService(explainer, tmp_path / "s", lambda: {"local": "revision"})
    done = kv_tiering("why", *words, "--socket", service.path)
    service.stop(30)
    assert [line.strip() for line in done.out.splitlines() if "began empty" in line] == [
        "(local began empty beside blocks that differ in revision)"
    ]


def test_other_causes_do_not_name_the_blocks_of_others(tmp_path: Path) -> None:
    service = ExplainService(explained("a"), tmp_path / "s", lambda: {"local": "revision"})
    done = kv_tiering("why", "a", "--socket", service.path)
    service.stop(30)
    assert "began empty" not in done.out


def test_the_answer_is_printed_as_data(engine: ExplainService) -> None:
    answer = json.loads(kv_tiering("why", "cmpl-7", "--json", "--socket", engine.path).out)
    assert sum(span["end"] - span["first"] for span in answer["causes"]) == answer["computed_tokens"] == 26


def test_an_unknown_request_is_a_finding(engine: ExplainService) -> None:
    done = kv_tiering("why", "other")
    assert (done.code, done.out) == (1, "")
    assert done.err == "request other is unknown, or is not among the last 1 requests; the latest: cmpl-7\n"


def test_an_engine_of_an_older_version_sums_an_hour(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    older = {"causes": [{"cause": "new", "tier": "", "tokens": 7}], "requests": 1, "followed_seconds": 60.0}
    monkeypatch.setattr("tiering.cli.why.ask", lambda path, question: older)
    done = kv_tiering("why", "--top", "--minutes", "5", "--socket", tmp_path)
    assert (done.code, done.out.splitlines()[0]) == (0, "7 prompt tokens computed in the last hour")


@pytest.mark.parametrize("words", [(), ("cmpl-7", "--top")])
def test_one_question_is_asked(words: tuple[str, ...]) -> None:
    done = kv_tiering("why", *words)
    assert done.code == 2
    assert "give the id of a request, or --top" in done.err


def test_without_an_engine_the_word_to_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = kv_tiering("why", "--top")
    assert done.code == 2
    assert "set explain: {} in its stack" in done.err


def test_of_several_engines_one_is_to_be_chosen(engine: ExplainService) -> None:
    second = ExplainService(make_explainer(), None)
    done = kv_tiering("why", "--top")
    second.stop(30)
    assert done.code == 2
    assert str(engine.path) in done.err


def test_a_socket_that_is_gone_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = kv_tiering("why", "--top", "--socket", tmp_path / "gone")
    assert done.code == 1
    assert "no engine answers" in done.err


def test_an_engine_without_requests_has_an_empty_hour(tmp_path: Path) -> None:
    service = ExplainService(make_explainer(), tmp_path / "s")
    done = kv_tiering("why", "--top", "--socket", service.path)
    service.stop(30)
    assert (done.code, done.out.splitlines()[0]) == (0, "0 of 0 prompt tokens computed in the last hour")
