"""The queue of one tier: order, turns, duplicates, and the ends of requests."""

from __future__ import annotations

import random

from tiering.api.request import ReqContext
from tiering.manager.cascade_queue import AT_ONCE, NOBODY, CascadeQueue, RequestEnd, tails_of
from tiering.testing.keys import keys_of

K = keys_of(*range(200))
R1, R2, R3 = (ReqContext(f"r{number}") for number in (1, 2, 3))


def queue_of(*parts: tuple[ReqContext, list[bytes]]) -> CascadeQueue:
    queue = CascadeQueue()
    for ctx, keys in parts:
        queue.append(ctx, keys, is_fill=False)
    return queue


def test_heads_come_first_and_requests_take_turns() -> None:
    queue = queue_of((R1, K[:100]), (R2, K[100:103]), (R1, K[103:106]))
    taken = [queue.take(1000) for _ in range(3)]
    assert [(batch.ctx, batch.keys) for batch in taken] == [
        (R1, K[:AT_ONCE]),
        (R2, K[100:103]),
        (R1, [*K[AT_ONCE:100], *K[103:106]]),
    ]
    assert not queue
    assert len(queue) == 0


def test_no_more_blocks_are_taken_than_there_is_credit_for() -> None:
    queue = queue_of((R1, K[:5]), (R2, K[5:7]))
    assert [queue.take(2).keys for _ in range(4)] == [K[:2], K[5:7], K[2:4], K[4:5]]


def test_fills_are_apart() -> None:
    queue = queue_of((R1, K[:1]))
    queue.append(R1, K[1:2], is_fill=True)
    assert [queue.take(5) for _ in range(2)] == [(R1, False, K[:1]), (R1, True, K[1:2])]


def test_a_queued_block_is_not_new() -> None:
    queue = queue_of((R1, K[:3]))
    assert queue.new(K[1:5]) == K[3:5]
    keys = K[3:5]
    assert queue.new(keys) is keys
    assert (K[0] in queue, K[3] in queue) == (True, False)


def test_a_block_that_leaves_is_not_taken_and_what_is_not_there_is_no_matter() -> None:
    queue = queue_of((R1, K[:3]), (R2, K[3:4]))
    assert queue.drop([K[1], K[3], K[9]]) == [K[1], K[3]]
    assert queue.take(9).keys == [K[0], K[2]]
    assert not queue


def test_a_finished_request_ends_when_its_last_block_has_gone() -> None:
    queue = queue_of((R1, K[:3]), (R2, K[3:4]))
    queue.append(R1, K[4:5], is_fill=True)
    assert queue.finish(RequestEnd(R1, K[:1]))
    assert not queue.finish(RequestEnd(R3)), "nothing of this request is queued"
    queue.take(3)
    queue.drop(K[3:4])
    assert queue.ended == [], "its fill is still there, and r2 has not finished"
    queue.take(1)
    assert queue.ended == [RequestEnd(R1, K[:1])]


def test_the_blocks_of_a_request_whose_id_is_used_again_belong_to_nobody() -> None:
    queue = queue_of((R1, K[:2]))
    queue.finish(RequestEnd(R1, K[:1]))
    queue.disown("r1")
    assert queue.ended == [RequestEnd(R1, K[:1])]
    again = ReqContext("r1")
    queue.append(again, K[2:3], is_fill=False)
    assert [queue.take(9)[::2] for _ in range(2)] == [(NOBODY, K[:2]), (again, K[2:3])]
    assert queue.ended == [RequestEnd(R1, K[:1])]


def test_tails_go_before_heads_and_the_last_request_first() -> None:
    queue = queue_of((R1, K[:4]), (R2, K[4:7]))
    assert [key for _, key in tails_of(queue.lanes_from_last(9))] == [
        *(K[6], K[5]), *(K[3], K[2]), *(K[4],), *(K[1], K[0]),
    ]  # fmt: skip
    assert [lane.ctx for lane in queue.lanes_from_last(1)] == [R2]
    (lane,) = queue.lanes_from_last(1)
    queue.come_next([(lane, K[6]), (lane, K[5])])
    assert queue.take(9) == (R2, False, [*K[5:7], K[4]])


def test_the_queue_is_what_a_plain_list_would_be() -> None:
    """A random walk beside a list of (request, key)."""
    dice, queue, plain = random.Random(3), CascadeQueue(), list[tuple[ReqContext, bytes]]()
    requests = [R1, R2, R3]
    for _ in range(3000):
        match dice.randrange(4):
            case 0 | 1:
                ctx, start = dice.choice(requests), dice.randrange(190)
                keys = list(queue.new(K[start : start + dice.randint(1, 10)]))
                if keys:
                    queue.append(ctx, keys, is_fill=False)
                    plain += [(ctx, key) for key in keys]
            case 2 if plain:
                ctx, _, keys = queue.take(dice.randint(1, 12))
                assert keys == [key for one, key in plain if one is ctx][: len(keys)]
                plain = [(one, key) for one, key in plain if key not in keys]
            case 3:
                gone = queue.drop(dice.sample(K, 5))
                plain = [(one, key) for one, key in plain if key not in gone]
        assert len(queue) == len(plain)
        assert all(key in queue for _, key in plain)
    assert sorted(queue.clear()) == sorted(key for _, key in plain)
