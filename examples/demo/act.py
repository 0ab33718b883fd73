"""One act, in a process of its own: ``python -m examples.demo.act SETTINGS.json``.

Prints one line of JSON per sign of progress, and writes an :class:`ActResult`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from examples.demo.report import ActResult
from examples.demo.workload import Answered, Shape, Workload
from examples.mini_engine import Engine, EngineOptions
from examples.mini_engine.request import Request
from examples.mini_engine.tiers import copy_nothing


@dataclass(slots=True)
class ActSettings:
    """The arguments of an act's process.

    ``seen``: the file of block names that were computed before (read, and extended). ``broken_loads``: loads copy
    nothing and claim success. ``inherits``: seconds to wait for blocks in rows of an engine that has ended. ``holds``:
    the engine stays up at the end, until it is killed. ``log``: where the act's log goes.
    """

    name: str
    result: str
    seen: str
    log: str
    stack: dict[str, Any] | None = None
    broken_loads: bool = False
    inherits: float = 0.0
    holds: bool = False
    num_blocks: int = 192
    threads: int = 1
    shape: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the settings to ``path``."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> ActSettings:
        """Read settings that were saved."""
        return cls(**json.loads(path.read_text()))


def say(**words: object) -> None:
    """One sign of progress."""
    print(json.dumps(words), flush=True)


def count_answer(result: ActResult, answered: Answered, engine: Engine, names: list[bytes], seen: set[bytes]) -> None:
    """Add one answer to the act's result; ``names`` are the blocks of its prompt."""
    output, size = answered.output, engine.options.block_size
    key = f"{answered.user}/{answered.turn + 1}"
    result.answers[key] = output.tokens
    result.digests[key] = output.logit_digests
    result.ttft_s.append(output.ttft_s)
    result.prompt_tokens += output.prompt_tokens
    result.hit_tokens_by_tier["gpu"] += output.gpu_hit_tokens
    computed_from = (output.gpu_hit_tokens + output.loaded_tokens) // size
    result.computed_tokens += output.prompt_tokens - output.gpu_hit_tokens - output.loaded_tokens
    result.recomputed_tokens += size * sum(name in seen for name in names[computed_from:])
    seen.update(names)


def count_bytes(result: ActResult, engine: Engine) -> None:
    """Attribute what was loaded to the tiers that it came from, by the bytes they really read."""
    if engine.tiers is None:
        return
    result.bytes_moved = dict(engine.tiers.bytes_moved)
    token_bytes = engine.tiers.block_bytes[0] // engine.options.block_size
    promoted = 0
    stack = engine.options.stack
    shared = isinstance(stack, Mapping) and "machine" in stack
    for name, stats in engine.tiers.secondary_stats().items():
        result.bytes_moved[f"{name}_read"] = stats["read_bytes"]
        result.bytes_moved[f"{name}_written"] = stats["written_bytes"]
        result.corrupt_blocks[name] = stats["corrupt_blocks"]
        # The bytes that a service has read are those of all its engines.
        blocks = stats["promotions"] * engine.options.block_size
        result.hit_tokens_by_tier[name] = blocks if shared else stats["read_bytes"] // token_bytes
        promoted += result.hit_tokens_by_tier[name]
    loaded = engine.tiers.bytes_moved.get("cpu_to_gpu", 0) // token_bytes
    result.hit_tokens_by_tier["cpu"] = max(0, loaded - promoted)


def inherited(engine: Engine, seconds: float) -> int:
    """Step for at most ``seconds`` until the engine has blocks of an earlier one, and return their number."""
    count, until = 0, time.monotonic() + seconds
    while engine.tiers is not None and not count and time.monotonic() < until:
        engine.step()
        count = engine.tiers.scheduler_half.get_stats()["manager"]["inherited_blocks"]
    return count


def perform(settings: ActSettings) -> ActResult:
    """Run the act."""
    torch.set_num_threads(settings.threads)
    workload = Workload(Shape(**settings.shape))
    result = ActResult(settings.name)
    seen_file = Path(settings.seen)
    seen = {bytes.fromhex(line) for line in seen_file.read_text().split()} if seen_file.exists() else set()
    options = EngineOptions(num_blocks=settings.num_blocks, stack=settings.stack)
    say(phase="start")
    replace_loads = copy_nothing if settings.broken_loads else None
    blocks: set[bytes] = set()
    with Engine(options, replace_loads) as engine:
        result.inherited_blocks = inherited(engine, settings.inherits)
        began = last = time.perf_counter()
        done = 0

        def on_step() -> None:
            nonlocal last
            if time.perf_counter() - last > 0.1:
                last = time.perf_counter()
                say(
                    phase="run",
                    done=done,
                    total=workload.requests,
                    computed=engine.worker.computed_tokens,
                    loaded=engine.loaded_bytes,
                )

        prompts = {user.name: list(user.opening) for user in workload.users}
        for answered in workload.play(engine, on_step):
            done += 1
            user = answered.user
            prompts[user] += workload.tokenizer.encode(f"\n\nUser: {answered.question}\nAssistant:")
            asked = Request(user, prompts[user])
            asked.update_hashes(options.block_size)
            count_answer(result, answered, engine, asked.block_hashes, seen)
            prompts[user] += answered.output.tokens
            blocks.update(asked.block_hashes)
            say(
                phase="answer",
                done=done,
                total=workload.requests,
                user=user,
                question=answered.question,
                answer=workload.tokenizer.decode(answered.output.tokens),
                ttft=answered.output.ttft_s,
            )
        result.seconds = time.perf_counter() - began
        say(phase="settle")
        result.settled = engine.settle(60.0)
        count_bytes(result, engine)
        result.kv_bytes = len(blocks) * engine.worker.cache.block_bytes
        seen_file.write_text("\n".join(name.hex() for name in seen))
        if settings.holds:
            result.save(Path(settings.result))
            say(phase="hold")
            sys.stdin.read()
    return result


def main() -> int:
    """Read the settings, run, write the result."""
    settings = ActSettings.load(Path(sys.argv[1]))
    logging.basicConfig(
        filename=settings.log, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    perform(settings).save(Path(settings.result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
