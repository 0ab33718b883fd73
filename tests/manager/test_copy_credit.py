"""The bound of the copies out of the engine's cache into an exclusive CPU tier that is much larger."""

from __future__ import annotations

import pytest

from tests.manager.test_exclusive import Rig
from tiering.api.request import ReqContext
from tiering.testing.keys import keys_of

KEYS = keys_of(*range(30))
OLD, NEW, LOADED = KEYS[:16], KEYS[16:], KEYS[:2]


@pytest.mark.parametrize(("blocks", "bounded"), [(0, False), (7, False), (6, True)])
def test_held_rows_stay_while_their_next_copies_would_be_too_many(blocks: int, bounded: bool) -> None:
    rig, ctx = Rig(16), ReqContext("load")
    assert rig.manager.hold_exclusively(lambda keys: [key in rig.engine for key in keys], blocks)
    assert rig.late(*OLD) == OLD
    rig.manager.on_new_request(ctx)
    rig.manager.prepare_load(LOADED, ctx)
    rig.manager.complete_load(LOADED, ctx)  # these blocks were not computed again, and leave the engine again
    rig.engine.update(LOADED)
    rig.manager.engine_holds(LOADED)
    rig.late(NEW[0])
    assert (LOADED[1] in rig.primary.readable) is bounded
    assert (OLD[-1] in rig.primary.readable) is not bounded
    for key in NEW[1:4]:  # computed blocks that leave the engine: there is credit for more copies
        rig.late(key)
    assert LOADED[1] not in rig.primary.readable
    assert OLD[-4] in rig.primary.readable
