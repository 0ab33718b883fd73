"""The engine: scheduler and worker in one process, one step after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from examples.mini_engine.kv_cache import KVCacheManager
from examples.mini_engine.model import ModelConfig
from examples.mini_engine.request import Request, Status
from examples.mini_engine.scheduler import Scheduler
from examples.mini_engine.worker import Worker

if TYPE_CHECKING:
    from examples.mini_engine.tiers import ReplaceLoads, Tiers


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of an engine.

    ``num_blocks`` GPU blocks of ``block_size`` tokens; ``kv_first``: layout of the KV tensors (see :class:`PagedKV`);
    ``loads_within_step``: a request may be computed in the step that loads its hit;
    ``stack``: a stack file or its content, None for no tiers; ``offload``: further extra configuration of the connector
    (``block_size``, ...).
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    num_blocks: int = 512
    block_size: int = 16
    kv_first: bool = False
    device: str = "cpu"
    max_batch_tokens: int = 256
    max_running: int = 8
    prefix_caching: bool = True
    loads_within_step: bool = False
    stack: str | Path | Mapping[str, Any] | None = None
    offload: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a request; times are in seconds, counts in tokens.

    ``logit_digests`` has a hash of all logits behind each token.
    """

    request_id: str
    tokens: list[int]
    logit_digests: list[int]
    ttft_s: float
    prompt_tokens: int
    gpu_hit_tokens: int
    loaded_tokens: int
    preemptions: int


class Engine:
    """Runs requests. With a stack of tiers, KV that leaves the GPU's pool is kept there and loaded again.

    ``replace_loads`` is for negative controls: see :mod:`examples.mini_engine.tiers`.
    """

    def __init__(self, options: EngineOptions, replace_loads: ReplaceLoads | None = None) -> None:
        self.options = options
        model = options.model
        windows = tuple(model.window_of(layers[0]) for layers in model.groups)
        self.kv = KVCacheManager(options.num_blocks, options.block_size, windows, options.prefix_caching)
        self.worker = Worker(
            model, options.num_blocks, options.block_size, kv_first=options.kv_first, device=options.device
        )
        self.tiers: Tiers | None = None
        if options.stack is not None:
            from examples.mini_engine.tiers import connect

            self.tiers = connect(
                self.worker,
                options.stack,
                offload=options.offload,
                prefix_caching=options.prefix_caching,
                loads_within_step=options.loads_within_step,
                max_batch_tokens=options.max_batch_tokens,
                replace_loads=replace_loads,
            )
            self.worker.connector = self.tiers.worker_half
        self.scheduler = Scheduler(
            self.kv,
            self.tiers.scheduler_half if self.tiers else None,
            max_batch_tokens=options.max_batch_tokens,
            max_running=options.max_running,
        )
        self.steps = 0

    @property
    def loaded_bytes(self) -> int:
        """Bytes that were copied from the CPU tier to the GPU's blocks."""
        return self.tiers.bytes_moved.get("cpu_to_gpu", 0) if self.tiers is not None else 0

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request, whatever it is doing."""
        self.scheduler.abort(request_id)

    def step(self) -> list[Output]:
        """One step; returns the requests that ended in it."""
        output = self.scheduler.schedule()
        sampled, connector_output = self.worker.execute(output, self.scheduler.requests, self.kv)
        if self.tiers is not None:
            self.tiers.collect(connector_output.kv_connector_stats)
        ended = self.scheduler.update(output, sampled, connector_output)
        self.steps += 1
        if not output.num_scheduled_tokens:
            time.sleep(0.0002)  # only copies are going on: leave them the processor
        return [_output(request) for request in ended]

    def run(
        self, requests: Sequence[Request], on_step: Callable[[list[Output]], None] | None = None
    ) -> dict[str, Output]:
        """Run ``requests`` together until all of them have ended; ``on_step`` is told what ended in each step."""
        for request in requests:
            self.add(request)
        outputs: dict[str, Output] = {}
        while any(request.status not in {Status.FINISHED, Status.ABORTED} for request in requests):
            ended = self.step()
            outputs.update((output.request_id, output) for output in ended)
            if on_step is not None:
                on_step(ended)
        return outputs

    def settle(self, timeout: float = 30.0) -> bool:
        """Step until no copy is in flight; False if that took longer than ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while self.scheduler.has_work():
            if time.monotonic() > deadline:
                return False
            self.step()
        return True

    def load_weights(self, seed: int) -> bool:
        """Load other weights and drop all KV on all tiers; return True if every tier has confirmed the reset."""
        self.worker.model.load_weights(seed)
        return self.reset()

    def reset(self) -> bool:
        """Forget all KV. Running requests start over."""
        return self.scheduler.reset()

    def shutdown(self) -> None:
        """Release the tiers. May be called twice."""
        if self.tiers is not None:
            self.tiers.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()


def _output(request: Request) -> Output:
    first = request.first_token_at if request.first_token_at is not None else request.arrived_at
    return Output(
        request.request_id,
        request.output,
        list(request.logit_digests),
        first - request.arrived_at,
        request.num_prompt_tokens,
        request.gpu_hit_tokens,
        request.loaded_tokens,
        request.preemptions,
    )
