"""The bound of the copies out of the engine's cache into an exclusive CPU tier that is much larger."""

from __future__ import annotations

import pytest

from tests.manager.test_exclusive import A, B, C, D, E, F, Rig
from tiering.api.request import ReqContext


@pytest.mark.parametrize(("blocks", "gone"), [(0, [A]), (2, [A]), (1, [D])])
def test_a_held_row_stays_while_its_next_copy_would_be_one_too_many(blocks: int, gone: list[bytes]) -> None:
    rig, ctx = Rig(4), ReqContext("load")
    assert rig.manager.hold_exclusively(lambda keys: [key in rig.engine for key in keys], blocks)
    assert rig.late(A, B, C, D) == [A, B, C, D]  # four blocks left the engine, which may cost five copies
    rig.manager.on_new_request(ctx)
    rig.manager.prepare_load([A], ctx)
    rig.manager.complete_load([A], ctx)  # one of them was not computed again
    rig.engine.add(A)
    rig.manager.engine_holds([A])
    assert rig.late(E) == [E]
    assert {A, B, C, D} - rig.held() == {*gone}
    # The block that left without a row was computed, so there is credit for one more copy.
    assert rig.late(F) == [F]
    assert A not in rig.held()
