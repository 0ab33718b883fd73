"""An engine in this process, with methods to ask, to evict the GPU's blocks and to count moved bytes."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.util
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from xxhash import xxh3_128_hexdigest

from tests.vllm.models import VOCABULARY
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.connector.step_loads import StepLoads
from tiering.copy.contract import OffloadingHandler
from tiering.testing.clock import until

Handler = TypeVar("Handler", bound=OffloadingHandler)

BLOCK = 32
NUM_BLOCKS = 40
MAX_LEN = 640
BLOCK_BYTES = 3 * 2 * 2 * 32 * BLOCK * 4
"""Bytes of a block of :func:`tests.vllm.models.write_llama`.

Factors: layers, K and V, KV heads, head size, tokens, bytes of a float32.
"""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",  # on a GPU: products of float32 in attention, which are of TF32 otherwise
}


def prepare_environment() -> None:
    """Set the environment before vLLM is imported: one process, no network."""
    os.environ.update(_ENVIRONMENT)


def prompt(seed: int, length: int = 200) -> list[int]:
    """Return random tokens."""
    dice = random.Random(seed)
    return [dice.randrange(VOCABULARY) for _ in range(length)]


def whole_blocks(prompts: Sequence[list[int]], size: int = BLOCK) -> int:
    """Return the number of GPU blocks in those blocks of ``size`` tokens that these prompts fill."""
    return sum(len(tokens) // size for tokens in prompts) * (size // BLOCK)


@dataclass(frozen=True, slots=True)
class Answer:
    """Generated tokens, with the logarithm of each token's probability."""

    tokens: list[int]
    logprobs: list[float]

    def matches(self, other: Answer) -> bool:
        """Return True if the tokens are equal, and the logprobs equal but for rounding."""
        return self.tokens == other.tokens and all(
            abs(mine - theirs) < 1e-3 for mine, theirs in zip(self.logprobs, other.logprobs, strict=True)
        )


def wrong(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[int]:
    """Return the indexes of the answers that differ from the expected ones."""
    return [number for number, (a, b) in enumerate(zip(answers, expected, strict=True)) if not a.matches(b)]


@dataclass
class Engine:
    """An ``LLM`` with or without tiers.

    Attributes:
        moved: bytes by kind of transfer, as the copies reported them.
    """

    llm: Any
    connector: Any = None
    worker: Any = None
    moved: dict[str, int] = field(default_factory=dict)
    preempted: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of hits by their source, as reported to vLLM."""
    scheduled: list[int] = field(default_factory=list)
    """Number of tokens of each step."""
    computed: int = 0
    """Prompt tokens that vLLM computed, by the first step of each request.

    What a request computes again later does not count: after its preemption, or because blocks that it found in the
    engine's cache turned out to be invalid.
    """
    _running: set[str] = field(default_factory=set)
    """Requests that have had a step."""
    _started: int = 0
    _answers: dict[str, Answer] = field(default_factory=dict)

    def ask(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int = 8,
        params: dict[str, Any] | None = None,
        lora: Any = None,
        salt: str | None = None,
        image: Any = None,
    ) -> list[Answer]:
        """Return the answers to ``prompts``.

        Args:
            params: kv_transfer_params of each request.
            lora: vLLM's LoRARequest.
            salt: cache salt of each request.
            image: image of each prompt that has a token for it.
        """
        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        sampling = _greedy(max_tokens, **extra)
        more: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        if image is not None:
            more["multi_modal_data"] = {"image": image}
        inputs = [{"prompt_token_ids": tokens, **more} for tokens in prompts]
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        return [_answer(output.outputs[0]) for output in outputs]

    def start(self, prompts: Sequence[list[int]], max_tokens: int = 8, **fields: Any) -> list[str]:
        """Add requests without a step of the engine; return their names for :meth:`finish`.

        Args:
            fields: further arguments of vLLM's ``add_request``.
        """
        first = self._started
        self._started += len(prompts)
        names = [f"request {number}" for number in range(first, self._started)]
        for name, tokens in zip(names, prompts, strict=True):
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, _greedy(max_tokens), **fields)
        return names

    def step(self) -> None:
        """Make one step, and keep the answers of the requests that end."""
        self._answers |= {
            done.request_id: _answer(done.outputs[0]) for done in self.llm.llm_engine.step() if done.finished
        }

    def finish(self, names: Sequence[str]) -> list[Answer]:
        """Step until these requests have ended; return their answers."""
        while not self._answers.keys() >= set(names):
            assert self.llm.llm_engine.has_unfinished_requests(), f"{names} ended without answers"
            self.step()
        return [self._answers.pop(name) for name in names]

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def step_loads(self) -> StepLoads:
        """The choice of the loads that run within the step, in either mode."""
        half = self.connector.scheduler_half
        found = getattr(half, "loads", half).step_loads
        assert isinstance(found, StepLoads)
        return found

    def settle(self, timeout: float = 60.0) -> None:
        """Step until no copy and no job of a tier is in flight."""
        end = time.monotonic() + timeout
        while self.connector.has_pending_push_work():
            assert time.monotonic() < end, "copies or tiers did not end"
            self.llm.llm_engine.step()

    def free_blocks(self) -> int:
        """Return the number of GPU blocks without users."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def evict(self) -> None:
        """Overwrite the GPU's blocks with other requests' KV and reset the engine's prefix cache."""
        self.settle()
        policy = {"kv_tiering": {"load": False, "store": False}}
        self.ask([prompt(10_000 + number, 500) for number in range(4)], max_tokens=1, params=policy)
        self.settle()
        assert self.llm.reset_prefix_cache()

    def loaded(self, action: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of ``action``, and the bytes loaded into GPU blocks while it ran."""
        before = self.moved.get("cpu_to_gpu", 0)
        result = action()
        return result, self.moved.get("cpu_to_gpu", 0) - before

    def tier(self, name: str) -> dict[str, Any]:
        """Return the counters of a secondary tier."""
        return dict(self.connector.scheduler_half.get_stats()["tiers"][name])

    def came_from(self, **tokens: int) -> bool:
        """Return True if these tokens of hits, by source, were reported to vLLM.

        vLLM asks for them from 0.32 on; before, nothing may be reported.
        """
        asks = importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is not None
        return self.sources == (tokens if asks else {})

    @contextmanager
    def loads_through(
        self, replace: Callable[[OffloadingHandler], Handler], *, within_steps: bool = False
    ) -> Iterator[Handler]:
        """Put another handler in front of the one that loads.

        Args:
            within_steps: True: requests may be computed in the step that loads for them, where no load may fail;
                False (default): they wait for their loads.
        """
        loads = self.step_loads
        before = loads.is_possible
        loads.is_possible = before and within_steps
        copies = self.worker.worker_half.copies
        real = copies.handlers[CPULoadStoreSpec, GPULoadStoreSpec]
        copies.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, replacement := replace(real))
        try:
            yield replacement
        finally:
            self.settle()
            copies.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, real)
            loads.is_possible = before

    def watch(self) -> None:
        report, build = self.worker.get_kv_connector_stats, self.connector.build_connector_meta
        tell = self.connector.get_external_cache_hit_sources

        def telling(request: Any, tokens: int) -> Any:
            told = tell(request, tokens)
            for source, count in told.items():
                self.sources[source.value] = self.sources.get(source.value, 0) + count
            return told

        def reporting() -> Any:
            stats = report()
            for name, value in (stats.reduce() if stats is not None else {}).items():
                kind = name.removesuffix("_total_bytes")
                if kind != name:
                    self.moved[kind] = self.moved.get(kind, 0) + int(value)
            return stats

        def building(output: Any) -> Any:
            self.preempted += len(output.preempted_req_ids or ())
            self.scheduled.append(output.total_num_scheduled_tokens)
            self._count_computed(output)
            return build(output)

        self.worker.get_kv_connector_stats, self.connector.build_connector_meta = reporting, building
        self.connector.get_external_cache_hit_sources = telling

    def _count_computed(self, output: Any) -> None:
        self._running.difference_update(output.finished_req_ids)
        for name in output.num_scheduled_tokens.keys() - self._running:
            request = self.scheduler.requests[name]
            self.computed += max(0, request.num_prompt_tokens - request.num_computed_tokens)
            self._running.add(name)

    def check_causes(self, timeout: float = 10.0) -> None:
        """Fail unless each prompt token that vLLM computed has one cause, if the stack explains misses."""
        half = getattr(self.connector, "scheduler_half", None)
        misses = getattr(half, "_misses", None)
        if misses is not None and not misses.service._stopped.is_set():
            until(lambda: sum(misses.explainer.sums.values()) == self.computed, timeout)
            assert sum(misses.explainer.sums.values()) == self.computed, dict(misses.explainer.sums)

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        cleanup_dist_env_and_memory()
        _freeze_modules()


@functools.cache
def _freeze_modules() -> None:
    """Keep the modules of vLLM from the garbage collector, once an engine has imported them.

    vLLM collects eight times in an engine's life; over all these objects that takes longer than the rest of its life.
    Its own freezing is left out, because its end would bring them back; engines stay garbage that is collected.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)
    for name in ("freeze", "unfreeze"):
        mock.patch.object(gc, name).start()


def _greedy(max_tokens: int, **extra: Any) -> Any:
    """Return vLLM's SamplingParams for answers that can be compared."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=1, detokenize=False, ignore_eos=True, **extra)


def _answer(output: Any) -> Answer:
    tokens = list(output.token_ids)
    return Answer(tokens, [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)])


def _explained(stack: dict[str, Any]) -> dict[str, Any]:
    """Return a stack that explains misses, unless its mode cannot."""
    return stack if stack.get("mode") == "simple" else {"explain": {}, **stack}


def transfer_config(stack: dict[str, Any], policy: str = "recompute") -> dict[str, Any]:
    """Return the value of --kv-transfer-config that a user would write."""
    return {
        "kv_connector": "TieringConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tiering.engines.vllm",
        "kv_connector_extra_config": stack,
        "kv_load_failure_policy": policy,
    }


def _memory_on_gpu() -> dict[str, Any]:
    """Return settings with which several engines share one GPU; none on another platform."""
    import torch

    return {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 256 << 20} if torch.cuda.is_available() else {}


@contextmanager
def engine(model: Path, stack: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
    """An engine for ``model``, whose computed prompt tokens are compared with their causes at its end.

    Args:
        stack: the connector's extra configuration; None: no connector. Where misses can be explained, they are.
        options: vLLM's options; ``kv_transfer_config`` selects a connector in place of ``stack``.
    """
    from vllm import LLM
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    settings = {
        **_memory_on_gpu(),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_model_len": MAX_LEN,
        "max_num_batched_tokens": 256,
        "max_num_seqs": 8,
        "kv_transfer_config": None if stack is None else transfer_config(_explained(stack)),
        **options,
    }
    running = Engine(LLM(str(model), **settings))
    try:
        if settings["kv_transfer_config"] is not None:
            running.connector, running.worker = running.scheduler.connector, get_kv_transfer_group()
            running.watch()
        yield running
        running.check_causes()
    finally:
        running.close()


COMMON: dict[Path, list[list[int]]] = {}
"""Prompts of a model that many tests use: its first engine without connector answers all of them."""

_known: dict[tuple[object, ...], Answer] = {}


def answers_without_tiers(
    model: Path, prompts: Sequence[list[int]], max_tokens: int = 8, image: Any = None, **options: Any
) -> list[Answer]:
    """Return the answers of an engine without connector, each prompt from an empty cache.

    Answers are kept by the content of the model, so that tests which ask the same need one engine together.
    """
    content = b"".join(file.read_bytes() for file in sorted(model.iterdir()) if file.is_file())
    pixels = None if image is None else image.tobytes()
    asked = (xxh3_128_hexdigest(content), max_tokens, pixels, repr(sorted(options.items())))
    wanted = [*prompts, *(COMMON.get(model, ()) if not options and max_tokens == 8 else ())]
    missing = [tokens for tokens in wanted if (*asked, *tokens) not in _known]
    if any(tokens in missing for tokens in prompts):
        with engine(model, None, enable_prefix_caching=False, **options) as plain:
            for tokens, answer in zip(missing, plain.ask(missing, max_tokens, image=image), strict=True):
                _known[(*asked, *tokens)] = answer
    return [_known[(*asked, *tokens)] for tokens in prompts]
