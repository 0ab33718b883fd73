"""Suspects among the GPU blocks: causes of suspicion, and the return of trust."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tiering.connector.suspects import STEPS_IN_FLIGHT, SuspectBlocks

SIZE = 4


@dataclass(frozen=True)
class Block:
    """A block of the engine's pool."""

    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None
    is_null: bool = False


@dataclass(frozen=True)
class Pool:
    """The engine's pool."""

    blocks: list[Block]


def suspects(*marked: int, sizes: tuple[int, ...] = (SIZE,)) -> SuspectBlocks:
    """Return suspects among the blocks of groups of these sizes; ``marked`` are suspects already."""
    blocks = SuspectBlocks(sizes)
    if marked:
        blocks.spread(marked, [], 0)
    return blocks


def among(blocks: SuspectBlocks, *asked: int) -> set[int]:
    """Return the suspects among ``asked``."""
    return {block for block in asked if block in blocks}


class TestSpread:
    def test_marks_the_unfilled_blocks_and_all_blocks_behind_them(self) -> None:
        blocks = suspects()
        assert not blocks
        assert blocks.spread({2}, [[[1, 2, 3]]], 0) == {2, 3}
        assert blocks
        assert among(blocks, 0, 1, 2, 3, 4) == {2, 3}

    def test_goes_on_in_requests_that_share_a_marked_block(self) -> None:
        tables = [[[7, 8]], [[3, 7]], [[1, 2, 3]], [[5, 6]]]
        assert suspects().spread({2}, tables, 0) == {2, 3, 7, 8}

    def test_covers_the_groups_of_a_request_from_the_same_token_on(self) -> None:
        blocks = suspects(sizes=(4, 8))
        assert blocks.spread({2}, [[[1, 2, 3, 4], [11, 12]]], 0) == {2, 3, 4, 11, 12}
        blocks = suspects(sizes=(4, 8))
        assert blocks.spread({3}, [[[1, 2, 3, 4], [11, 12]]], 0) == {3, 4, 12}

    def test_never_marks_the_null_block(self) -> None:
        blocks = suspects()
        assert blocks.spread({2}, [[[1, 2, 0, 4]], [[0, 9]]], 0) == {2, 4}
        assert among(blocks, 0, 9) == set()

    def test_covers_the_tables_of_requests_that_steps_in_flight_may_still_fill(self) -> None:
        blocks = suspects()
        blocks.give_up([[1, 2, 3]], 5)
        assert blocks.spread({1}, [], 5 + STEPS_IN_FLIGHT) == {1, 2, 3}

    def test_forgets_these_tables_when_no_step_is_in_flight_any_more(self) -> None:
        blocks = suspects()
        blocks.give_up([[1, 2, 3]], 100)
        blocks.give_up([[4, 5]], 101)
        assert blocks.spread({1, 4}, [], 101 + STEPS_IN_FLIGHT) == {1, 4, 5}
        blocks.give_up([[1, 6]], 140)
        assert blocks.spread({1}, [], 141) == {1, 6}

    def test_covers_all_tables_that_were_given_up_in_these_steps(self) -> None:
        blocks = suspects()
        blocks.give_up([[1, 2, 3]], 5)
        blocks.give_up([[4, 5]], 6)
        assert blocks.spread({1, 4}, [], 7) == {1, 2, 3, 4, 5}


class TestFirstToken:
    @pytest.mark.parametrize(("wrong", "token"), [({1}, 0), ({2}, 4), ({3, 2}, 4), ({9}, None), (set(), None)])
    def test_is_the_start_of_the_first_block_found(self, wrong: set[int], token: int | None) -> None:
        assert suspects().first_token([[1, 2, 3]], wrong) == token

    def test_is_the_smallest_over_all_groups(self) -> None:
        blocks = suspects(sizes=(4, 8))
        assert blocks.first_token([[1, 2, 3, 4], [11, 12]], {4, 12}) == 8
        assert blocks.first_token([[1, 2, 3, 4], [11, 12]], {2, 12}) == 4
        assert blocks.first_token([[1, 2, 3, 4], [11, 12]], {12}) == 8

    def test_the_null_block_is_none(self) -> None:
        assert suspects().first_token([[0, 0, 3]], {0, 3}) == 8

    def test_the_suspects_themselves_may_be_asked(self) -> None:
        blocks = suspects(3)
        assert blocks.first_token([[1, 2, 3]], blocks) == 8


class TestReset:
    def test_marks_the_blocks_that_are_used_or_cached(self) -> None:
        blocks = suspects(4)
        blocks.reset(Pool([Block(0, 1, is_null=True), Block(1, 1), Block(2, 0, b"hash"), Block(3), Block(4)]))
        assert blocks
        assert among(blocks, 0, 1, 2, 3, 4) == {1, 2}

    def test_marks_all_blocks_of_an_engine_that_shows_no_pool(self) -> None:
        blocks = suspects()
        blocks.reset(None)
        assert blocks
        assert among(blocks, 0, 1, 999) == {1, 999}

    def test_then_trusts_the_blocks_that_are_filled_again(self) -> None:
        blocks = suspects()
        blocks.reset(None)
        blocks.filled([[1, 2]], None)
        assert among(blocks, 1, 2, 3) == {3}
        blocks.filled([[2]], 0)
        assert among(blocks, 1, 2, 3) == {2, 3}

    def test_with_a_pool_ends_the_distrust_of_all_others(self) -> None:
        blocks = suspects()
        blocks.reset(None)
        blocks.reset(Pool([Block(1, 1)]))
        assert among(blocks, 1, 2) == {1}


class TestFilled:
    def test_blocks_are_trusted_again(self) -> None:
        blocks = suspects(1, 2, 3)
        blocks.filled([[1], [3]], None)
        assert among(blocks, 1, 2, 3) == {2}

    def test_blocks_behind_a_suspect_are_suspects_too(self) -> None:
        blocks = suspects()
        blocks.filled([[5, 0, 6]], 8)
        assert among(blocks, 0, 5, 6) == {5, 6}

    def test_without_suspects_nothing_changes(self) -> None:
        blocks = suspects()
        blocks.filled([[5]], None)
        assert not blocks


class TestAssigned:
    def test_without_suspects_everything_may_be_stored(self) -> None:
        assert suspects().assigned([[]], [[1, 2]], 0, None) is None

    def test_a_suspect_that_was_found_in_the_engine_s_cache_ends_the_stores(self) -> None:
        blocks = suspects(2)
        assert blocks.assigned([[]], [[1, 2, 3]], 8, None) == 4
        assert among(blocks, 1, 2, 3) == {2, 3}

    def test_blocks_that_are_filled_for_the_request_are_trusted(self) -> None:
        blocks = suspects(2, 3)
        assert blocks.assigned([[]], [[1, 2, 3]], 4, None) is None
        assert not blocks

    def test_a_request_that_was_not_matched_may_have_found_any_block(self) -> None:
        blocks = suspects(3)
        assert blocks.assigned([[]], [[1, 2, 3]], None, None) == 8
        assert among(blocks, 3) == {3}

    def test_a_request_that_was_not_matched_may_also_fill_the_blocks_behind_a_suspect(self) -> None:
        blocks = suspects(2, sizes=(4, 8))
        assert blocks.assigned([[], []], [[1, 2, 0, 4, 5], [11, 12, 13]], None, None) == 4
        assert among(blocks, 0, 1, 2, 4, 5, 11, 12, 13) == {2, 4, 5, 11, 12, 13}

    def test_other_blocks_than_before_may_also_be_filled_behind_a_suspect(self) -> None:
        blocks = suspects()
        blocks.reset(None)
        blocks.filled([[1, 3, 4]], None)
        assert blocks.assigned([[9]], [[1, 2, 3, 4]], 4, None) == 4
        assert among(blocks, 1, 2, 3, 4) == {2, 3, 4}

    def test_the_found_tokens_count_in_blocks_of_each_group(self) -> None:
        blocks = suspects(2, 12, sizes=(4, 8))
        assert blocks.assigned([[], []], [[1, 2, 3], [11, 12]], 8, None) == 4
        blocks = suspects(12, sizes=(4, 8))
        assert blocks.assigned([[], []], [[1, 2, 3], [11, 12]], 8, None) is None
        assert not blocks

    def test_further_blocks_follow_the_rule_of_the_first_ones(self) -> None:
        blocks = suspects(2)
        assert blocks.assigned([[1, 2]], [[1, 2, 3]], 8, 4) == 4
        assert among(blocks, 1, 2, 3) == {2, 3}
        blocks = suspects(3, 9)
        assert blocks.assigned([[1, 2]], [[1, 2, 3]], 8, None) is None
        assert among(blocks, 3, 9) == {9}

    def test_other_blocks_than_before_may_all_have_been_found(self) -> None:
        blocks = suspects(3)
        assert blocks.assigned([[1, 2]], [[1, 3]], 0, None) == 4
        blocks = suspects(2)
        assert blocks.assigned([[1, 2]], [[1]], 0, None) is None, "the request lost the suspect"
        blocks = suspects(1)
        assert blocks.assigned([[1, 2]], [[1]], 0, None) == 0, "a table that shrinks is a new one"

    @pytest.mark.parametrize("other", [3, 1000])
    def test_another_block_in_the_place_of_a_known_one_makes_the_table_a_new_one(self, other: int) -> None:
        blocks = suspects(other)
        assert blocks.assigned([[1, 500]], [[1, other]], 0, None) == 4

    def test_equal_ids_are_the_same_block(self) -> None:
        blocks = suspects(1000)
        known, table = [int("1000")], [int("1000"), 7]
        assert blocks.assigned([known], [table], 8, None) is None, "the request filled the block itself"

    def test_a_null_block_in_the_place_of_one_that_a_window_has_passed_is_no_other_block(self) -> None:
        blocks = suspects(3)
        assert blocks.assigned([[1, 2]], [[0, 2, 3]], 8, None) is None
        assert not blocks
        blocks = suspects(3)
        assert blocks.assigned([[0, 2]], [[1, 2, 3]], 8, None) is None
        assert not blocks

    def test_an_earlier_answer_holds_when_no_suspect_is_left(self) -> None:
        blocks = suspects()
        assert blocks.assigned([[1, 2]], [[1, 2, 3]], 8, 4) == 4
        assert among(blocks, 1, 2, 3) == {3}

    def test_an_earlier_answer_is_void_when_the_request_starts_over(self) -> None:
        assert suspects().assigned([[]], [[1, 2]], 8, 4) is None


class TestRecomputed:
    def test_blocks_that_are_computed_to_their_end_are_trusted(self) -> None:
        blocks = suspects(2, 3, 4)
        assert blocks.recomputed([[1, 2, 3, 4]], 4, 14) == 14
        assert among(blocks, 1, 2, 3, 4) == {4}
        assert blocks.recomputed([[1, 2, 3, 4]], 14, 16) is None
        assert not blocks

    def test_a_block_is_trusted_from_any_of_its_tokens_on(self) -> None:
        blocks = suspects(2)
        assert blocks.recomputed([[1, 2, 3]], 6, 8) is None
        assert not blocks

    def test_other_suspects_than_the_request_s_do_not_matter(self) -> None:
        blocks = suspects(2, 9)
        assert blocks.recomputed([[1, 2, 3]], 4, 8) is None
        assert among(blocks, 2, 9) == {9}

    def test_a_step_that_does_not_reach_the_token_changes_nothing(self) -> None:
        blocks = suspects(2)
        assert blocks.recomputed([[1, 2]], 4, 2) == 4
        assert among(blocks, 1, 2) == {2}

    def test_all_groups_must_be_trusted(self) -> None:
        blocks = suspects(2, 12, sizes=(4, 8))
        assert blocks.recomputed([[1, 2, 3, 4], [11, 12]], 4, 8) == 8
        assert among(blocks, 2, 12) == {12}

    def test_without_suspects_everything_may_be_stored(self) -> None:
        assert suspects().recomputed([[1, 2]], 4, 4) is None

    def test_the_null_block_is_never_trusted_or_suspected(self) -> None:
        blocks = suspects()
        blocks.reset(None)
        assert blocks.recomputed([[0, 2]], 0, 8) is None
        assert among(blocks, 0, 2, 3) == {3}
