"""Features of vLLM beside the tiers: drafts, data types, salts, prompt embeddings, prompt logprobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import OneWrongBlock
from tests.vllm.models import write_draft
from tests.vllm.rig import BLOCK, BLOCK_BYTES, Answer, Engine, engine, prompt, whole_blocks, wrong

PROMPTS = [prompt(seed) for seed in range(2)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES
EMBEDS = [70, 71]
"""Seeds of prompts that are given as embeddings."""
ASKED = [prompt(seed, 100) for seed in range(80, 83)]
SPOKEN = 60
"""Tokens to generate with drafts. The last token fills a block with tokens, but usually not with KV."""
FULL_OF_KV = (100 + SPOKEN) // BLOCK - 1
NEXT = [7, 9]
"""The next user's words."""
CPU = {"primary": {"capacity": "64MiB"}}
MODES: dict[str, dict[str, Any] | None] = {
    "tiering": {**CPU, "offload_prompt_only": False},
    "eager": {**CPU, "mode": "simple"},
    "lazy": {**CPU, "mode": "simple", "lazy_offload": True},
}


def embeds(seed: int) -> Any:
    """Return random embeddings for as many tokens as an ordinary prompt has."""
    import torch

    return torch.randn(200, 128, generator=torch.Generator().manual_seed(seed)) * 0.1


def generate(running: Engine, inputs: Sequence[dict[str, Any]], **more: Any) -> list[Any]:
    """Return vLLM's own outputs; ``more`` are fields of its SamplingParams."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False, ignore_eos=True, **more)
    return list(running.llm.generate(list(inputs), sampling, use_tqdm=False))


def answers_of(outputs: Sequence[Any]) -> list[Answer]:
    found = []
    for output in outputs:
        (answer,) = output.outputs
        tokens = list(answer.token_ids)
        found.append(Answer(tokens, [step[token].logprob for step, token in zip(answer.logprobs, tokens, strict=True)]))
    return found


def of_prompts(outputs: Sequence[Any]) -> list[Answer]:
    """Return the tokens of the prompts, except each first one, with their logprobs."""
    found = []
    for output in outputs:
        tokens = list(output.prompt_token_ids)[1:]
        steps = output.prompt_logprobs[1:]
        found.append(Answer(tokens, [step[token].logprob for step, token in zip(steps, tokens, strict=True)]))
    return found


@dataclass(slots=True)
class Expected:
    """The results of an engine without tiers and without drafts.

    Attributes:
        logprobs: logprobs of the prompts' own tokens.
        after: answers to the prompts that include the generated answers.
    """

    answers: list[Answer]
    logprobs: list[Answer]
    embedded: list[Answer]
    spoken: list[Answer]
    after: list[Answer] = field(default_factory=list)

    def continued(self) -> list[list[int]]:
        """Return the prompts with their generated answers and the next user's words."""
        return [[*tokens, *answer.tokens, *NEXT] for tokens, answer in zip(ASKED, self.spoken, strict=True)]


@pytest.fixture(scope="module")
def expected(llama: Path) -> Expected:
    with engine(llama, None, enable_prefix_caching=False, enable_prompt_embeds=True) as plain:
        outputs = generate(plain, [{"prompt_token_ids": tokens} for tokens in PROMPTS], prompt_logprobs=0)
        embedded = generate(plain, [{"prompt_embeds": embeds(seed)} for seed in EMBEDS])
        found = Expected(answers_of(outputs), of_prompts(outputs), answers_of(embedded), plain.ask(ASKED, SPOKEN))
        found.after = plain.ask(found.continued())
        return found


@pytest.fixture(scope="class", params=list(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="class")
def drafting(llama: Path, expected: Expected, mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = write_draft(tmp_path_factory.mktemp("draft"), llama, noise=0.005)
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    with engine(llama, MODES[mode], speculative_config=drafts, disable_log_stats=False) as running:
        yield running


def drafted(running: Engine) -> tuple[int, int]:
    """Return the numbers of drafted tokens and of accepted ones."""
    found = {metric.name: getattr(metric, "value", 0) for metric in running.llm.get_metrics()}
    return found["vllm:spec_decode_num_draft_tokens"], found["vllm:spec_decode_num_accepted_tokens"]


class TestSpeculativeDecoding:
    """Drafts of a second model, some accepted and some rejected."""

    def test_what_was_said_comes_back_without_what_was_rejected_and_with_the_drafters_own_kv(
        self, drafting: Engine, expected: Expected, mode: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        computed, finish = [], drafting.connector.request_finished_all_groups

        def finishing(request: Any, block_ids: Any) -> Any:
            known = request.num_computed_tokens - request.num_output_placeholders  # asynchronous: of steps ahead
            computed.append(min(known, request.num_tokens))
            return finish(request, block_ids)

        def go_on() -> tuple[list[Answer], tuple[int, int]]:
            before = drafted(drafting)
            answers = drafting.ask(expected.continued())
            return answers, (drafted(drafting)[0] - before[0], drafted(drafting)[1] - before[1])

        with monkeypatch.context() as patch:
            patch.setattr(drafting.connector, "request_finished_all_groups", finishing)
            assert wrong(drafting.ask(ASKED, SPOKEN), expected.spoken) == []
        guessed, right = drafted(drafting)
        assert min(right, guessed - right) > SPOKEN
        drafting.evict()
        (answers, guesses), loaded = drafting.loaded(go_on)
        assert wrong(answers, expected.after) == []
        full = len(ASKED) * FULL_OF_KV
        if mode == "eager":  # eager mode also stores the last block at the end, if its last token was an accepted draft
            full = sum(tokens // BLOCK for tokens in computed)
        assert loaded == full * 2 * BLOCK_BYTES
        answers, from_the_engines_own_cache = go_on()
        assert wrong(answers, expected.after) == []
        assert guesses == from_the_engines_own_cache


DATA_TYPES: dict[str, tuple[int, dict[str, Any]]] = {
    "bfloat16, blocks of 64 tokens": (2, {"dtype": "bfloat16", "block_size": 2 * BLOCK, "num_gpu_blocks_override": 24}),
    "fp8": (4, {"kv_cache_dtype": "fp8"}),
    "fp8 but for one of three layers": (2, {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["1"]}),
}
"""The factor by which the KV is smaller, and the engine options for it."""


@pytest.mark.parametrize(("name", "mode"), [*((name, "tiering") for name in DATA_TYPES), ("fp8", "eager")])
def test_kv_of_another_type_is_as_good_from_a_tier_as_from_the_engines_own_cache(
    llama: Path, name: str, mode: str
) -> None:
    smaller, options = DATA_TYPES[name]
    with engine(llama, MODES[mode], **options) as running:

        def one_by_one() -> list[Answer]:
            return [running.ask([tokens])[0] for tokens in PROMPTS]

        one_by_one()
        own, loaded = running.loaded(one_by_one)
        assert loaded == 0
        running.evict()
        with running.loads_through(OneWrongBlock):
            assert wrong(running.ask(PROMPTS[:1], params={"kv_tiering": {"store": False}}), own[:1]) == [0]
        running.evict()
        answers, loaded = running.loaded(one_by_one)
        assert answers == own
        assert loaded == ALL // smaller


@pytest.fixture(scope="class", params=["tiering", "eager"])
def tiered(llama: Path, expected: Expected, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine(llama, MODES[request.param], enable_prompt_embeds=True) as running:
        yield running


class TestRequests:
    """Request fields that change the KV, or the part of it that may be used."""

    def test_kv_is_shared_between_requests_of_one_salt_only(self, tiered: Engine, expected: Expected) -> None:
        for salt, blocks in [("a", 0), ("b", 0), ("a", ALL), ("b", ALL)]:
            inputs = [{"prompt_token_ids": tokens, "cache_salt": salt} for tokens in PROMPTS]
            outputs, loaded = tiered.loaded(partial(generate, tiered, inputs))
            assert wrong(answers_of(outputs), expected.answers) == []
            assert loaded == blocks
            tiered.evict()

    def test_prompts_given_as_embeddings_are_known_by_them(self, tiered: Engine, expected: Expected) -> None:
        first, second = [{"prompt_embeds": embeds(seed)} for seed in EMBEDS]
        for inputs, blocks, answers in [
            ([first], 0, expected.embedded[:1]),
            ([second], 0, expected.embedded[1:]),
            ([first, second], ALL, expected.embedded),
        ]:
            outputs, loaded = tiered.loaded(partial(generate, tiered, inputs))
            assert wrong(answers_of(outputs), answers) == []
            assert loaded == blocks
            tiered.evict()

    def test_a_prompt_whose_logprobs_are_asked_for_is_computed_and_its_kv_is_stored(
        self, tiered: Engine, expected: Expected, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
        promised, promise = [], tiered.connector.get_num_new_matched_tokens

        def promising(request: Any, computed: int) -> Any:
            promised.append(promise(request, computed))
            return promised[-1]

        monkeypatch.setattr(tiered.connector, "get_num_new_matched_tokens", promising)
        for _ in range(2):
            outputs, loaded = tiered.loaded(lambda: generate(tiered, inputs, prompt_logprobs=0))
            assert wrong(of_prompts(outputs), expected.logprobs) == []
            assert wrong(answers_of(outputs), expected.answers) == []
            assert loaded == 0
            tiered.evict()
        assert set(promised) == {(0, False)}
        outputs, loaded = tiered.loaded(lambda: generate(tiered, inputs))
        assert wrong(answers_of(outputs), expected.answers) == []
        assert loaded == ALL
