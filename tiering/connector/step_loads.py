"""The loads that run within the step in which the engine finds their request.

Such a request is computed one step earlier than one that waits for its load. The step has the copies in front of its
model, so that they delay all of its requests. Therefore only hits are loaded so whose copies take about a
millisecond together, at the speed that loads had lately.

Where no request runs yet, the copies delay no other one, and hits that come together are best computed together: loads
beside the step would end one after the other, and each of the steps meanwhile runs the model for the few that are
there. Such a step may have several milliseconds of copies.

Nobody can take back what a step has computed, so that such a load must not fail. Its blocks are readable in the CPU
tier: what is left is a copy in memory, which no medium takes part in. A worker that cannot make it ends with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from tiering.api.engine import EngineConfig
from tiering.api.manager import PrefixMatch
from tiering.connector.groups import OffloadGroup
from tiering.connector.hits import HitSearch, PrefixLookup
from tiering.connector.tracked import TrackedRequest

STEP_SECONDS = 1e-3
"""Most seconds by which loads delay a step that computes running requests too."""

ALONE = 8
"""Times as many blocks may be loaded within a step in which no request runs that was scheduled before.

A request that comes meanwhile waits as long as for a step of a large model.
"""

PROBE_BLOCKS, PROBE_EVERY = 16, 64
"""Most blocks of a hit that is loaded within the step to be measured, and the distance of such hits.

A prefix of 256 tokens has 16 blocks of vLLM's usual 16 tokens.

The speed of a copy beside the engine says little: its thread waits for the engine's.
"""

MEASURED = 16
"""Number of the latest loads that are measured.

The fastest of them counts: the others may have waited for a processor.
"""


class StepLoads:
    """Choice of the hits that are loaded within the step.

    Args:
        groups: the KV-cache groups.
        held: the blocks that can be loaded.
        search: determines the blocks that a hit needs.
        engine: configuration of the engine.
    """

    def __init__(
        self, groups: Sequence[OffloadGroup], held: PrefixLookup, search: HitSearch, engine: EngineConfig
    ) -> None:
        # An engine moves states while it prepares a step, and copies a part of a block that is named by several hashes.
        # The blocks of a load within the step are not filled by then.
        placed = all(group.gpu_block_size == engine.hash_block_size and not group.is_state for group in groups)
        self.is_possible = engine.loads_within_step and placed and not engine.has_scratch
        """True if hits of this engine may be loaded within the step."""
        self._several = len(groups) > 1
        self._held = held
        self._search = search
        self._speeds = deque[float](maxlen=MEASURED)
        """Blocks per second of the latest loads."""
        self._budget = 0
        """Most blocks that are loaded within a step; 0 until a load was measured."""
        self._unmeasured = PROBE_EVERY - 1
        """Small hits beyond the budget since the last one that was loaded within the step."""
        self._planned = 0
        """Blocks that are loaded within the present step."""

    def fits(self, state: TrackedRequest[Any], computed: int, end: int, *, is_alone: bool = False) -> bool:
        """Return True if a hit is to be loaded within the step.

        At least one token must be left to compute. An adapter may turn out to be another one while the step runs, so
        that its loads may fail. A hit that needs no block, at the border of a chunk, has nothing to load.

        Args:
            state: the request.
            computed: leading tokens that the engine's own prefix cache holds.
            end: end of the request's hit, in tokens.
            is_alone: True if no request runs that was scheduled in an earlier step; default: False.
        """
        if not self.is_possible or end >= state.request.num_tokens or state.variant is not None:
            return False
        measure = self._search.measure
        budget = self._budget * ALONE if is_alone else self._budget
        if measure.is_full and (end - computed) // measure.offloaded_block_size > max(budget, PROBE_BLOCKS):
            return False  # without a look at its keys
        needed = [keys for keys in self._search.needed(state.keys, computed, end) if keys]
        blocks = self._planned + sum(map(len, needed))
        if not needed or (blocks > budget and not self._is_probe(blocks)):
            return False
        # The search of one group may have had blocks of another evicted.
        match = self._held.match_prefix
        return not self._several or all(match(keys, state.ctx) == PrefixMatch(len(keys), False) for keys in needed)

    def _is_probe(self, blocks: int) -> bool:
        """Return True if a hit beyond the budget is loaded within the step to measure the copy."""
        if blocks <= PROBE_BLOCKS and not self._planned:
            self._unmeasured += 1
            return self._unmeasured >= PROBE_EVERY
        return False

    def add(self, blocks: int) -> None:
        """Record blocks that are loaded within the present step."""
        self._planned += blocks
        if self._planned > self._budget:
            self._unmeasured = 0  # not before: the engine may have had no blocks for the hit

    def end_step(self) -> None:
        """Begin with the next step."""
        self._planned = 0

    def measure(self, blocks: int, seconds: float) -> None:
        """Record the time that the copy of a load took."""
        self._speeds.append(blocks / seconds)
        self._budget = int(max(self._speeds) * STEP_SECONDS)
