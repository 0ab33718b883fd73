"""Hints of a trace: its sessions, their ends, and what a replay makes of them."""

from __future__ import annotations

from tests.replay.traces import BLOCK_BYTES, BLOCK_TOKENS, request
from tiering.api.hints import NO_HINTS, HintBounds
from tiering.config.stack_file import load_stack
from tiering.replay.hints import LIE_SECONDS, TraceHints
from tiering.replay.model import ReplayModel
from tiering.replay.replay import Replay
from tiering.replay.trace import TraceRequest

TRACE = [
    request(0, range(4)),  # session 0
    request(10, [100, 101]),  # session 1
    request(20, range(6)),  # session 0 goes on, and ends
    request(30, [100, 101, 102]),  # session 1 goes on, and ends
    request(40, range(50, 54)),
]


def read(trace: list[TraceRequest], share: float) -> TraceHints:
    hints = TraceHints(share, BLOCK_TOKENS)
    for each in trace:
        hints.add(each)
    return hints


def test_a_request_continues_the_session_whose_blocks_it_begins_with() -> None:
    hints = read(TRACE, 1.0)
    sessions = [hints.of(number).session for number in range(5)]
    assert sessions[0] == sessions[2] != sessions[1] == sessions[3] != sessions[4]


def test_the_last_request_of_a_session_releases_it() -> None:
    hints = read(TRACE, 1.0)
    assert [bool(hints.of(number).released) for number in range(5)] == [False, False, True, True, True]


def test_a_request_that_its_session_continues_expects_the_next_one() -> None:
    hints = TraceHints(1.0, BLOCK_TOKENS, HintBounds(blocks=8, retain=0.5))
    for each in TRACE:
        hints.add(each)
    assert [[action[0::2] for action in hints.of(number).kept] for number in range(5)] == [
        [("expect", 20.0)], [("expect", 20.0)], [], [], [],
    ]  # fmt: skip
    assert [hints.of(number).kept for number in (0, 1)] != [(), ()]
    assert all(not read(TRACE, 1.0).of(number).kept for number in range(5)), "the default bounds release only"


def test_a_session_that_is_expected_stays_before_one_used_later() -> None:
    trace = [request(0, range(4)), request(10, range(50, 54)), request(20, range(60, 64)), request(30, range(6))]
    stack = load_stack({"primary": {"capacity": 8 * BLOCK_BYTES}, "hints": {"retain": 0.5}})
    rates = []
    for share in (0.0, 1.0):
        hints = TraceHints(share, BLOCK_TOKENS, stack.hints.bounds)
        for each in trace:
            hints.add(each)
        rates.append(Replay(stack, BLOCK_TOKENS, BLOCK_BYTES, ReplayModel(), hints).run(trace).hit_rate)
    assert rates == [0.0, 4 / 18]


def test_a_share_of_the_sessions_sends_hints() -> None:
    trace = [request(number, [1000 + number, 2000 + number]) for number in range(400)]
    trace += [request(500 + number, [1000 + number, 2000 + number, 3000 + number]) for number in range(400)]
    half, again, none = read(trace, 0.5), read(trace, 0.5), read(trace, 0.0)
    assert 150 < sum(half.of(number) is not NO_HINTS for number in range(400)) < 250
    assert [half.of(number) for number in range(800)] == [again.of(number) for number in range(800)]
    assert not any(half.of(number).released for number in range(400))
    assert all(none.of(number) is NO_HINTS for number in range(800))


def test_hints_that_lie_release_what_goes_on_and_expect_what_is_over() -> None:
    bounds = HintBounds(blocks=8, retain=0.5)
    honest, lying = TraceHints(1.0, BLOCK_TOKENS, bounds), TraceHints(1.0, BLOCK_TOKENS, bounds, lies=1.0)
    for each in TRACE:
        honest.add(each)
        lying.add(each)
    for number in range(5):
        assert bool(lying.of(number).released) != bool(honest.of(number).released)
        assert [action.seconds for action in lying.of(number).kept] == ([] if number < 2 else [LIE_SECONDS])


def test_a_seed_chooses_the_sessions() -> None:
    trace = [request(number, [1000 + number, 2000 + number]) for number in range(40)]
    chosen = []
    for seed in (1, 1, 2):
        hints = TraceHints(0.5, BLOCK_TOKENS, seed=seed)
        for each in trace:
            hints.add(each)
        chosen.append([hints.of(number) is NO_HINTS for number in range(40)])
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_released_session_makes_room_for_one_that_goes_on() -> None:
    trace = [request(0, range(4)), request(100, range(50, 54)), request(200, range(60, 64)), request(300, range(4))]
    stack = load_stack({"primary": {"capacity": 8 * BLOCK_BYTES}})
    rates = [
        Replay(stack, BLOCK_TOKENS, BLOCK_BYTES, ReplayModel(), read(trace, share)).run(trace).hit_rate
        for share in (0.0, 1.0)
    ]
    assert rates == [0.0, 4 / 16]
