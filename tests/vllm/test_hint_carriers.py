"""Sessions and hints over HTTP, by the client of OpenAI: chat, completions and responses."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.test_documents import ROOT, blocks
from tests.vllm.models import VOCABULARY, write_llama, write_tokenizer
from tests.vllm.rig import BLOCK, BLOCK_BYTES
from tests.vllm.server import Server, serve, until

REPEATED = 12
WORDS = 3 * BLOCK + 4
"""Words of a prompt of three whole blocks or more: some words are two tokens."""
ROWS = 128
TEMPLATE = f"{{% for message in messages %}}{{{{ (message['content'] + ' ') * {REPEATED} }}}}{{% endfor %}}"
"""A template that repeats each message, so that a short one fills a block."""
OWN_FIELD = importlib.util.find_spec("vllm.v1.kv_hints") is not None

pytestmark = pytest.mark.skipif(not OWN_FIELD, reason="vLLM 0.32 brought the field session_id")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("spoken")
    model = write_tokenizer(write_llama(directory / "model"))
    template = directory / "template.jinja"
    template.write_text(TEMPLATE)
    names = ("--served-model-name", "tiny", "served-model")
    options = ("--no-skip-tokenizer-init", "--chat-template", str(template), *names)
    stack = {
        "primary": {"capacity": ROWS * BLOCK_BYTES},
        "secondary": [{"type": "memory", "capacity": "64MiB"}],
        "hints": {"prefetch": "1GiB"},
    }
    with serve(model, stack, directory / "log", *options) as running:
        yield running


def client(server: Server) -> Any:
    openai = importlib.import_module("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none")


def words(count: int, *seed: object) -> str:
    """Return a text of so many words."""
    dice = random.Random(repr(seed))
    return " ".join(f"word{dice.randrange(2, VOCABULARY)}" for _ in range(count))


def chat(asking: Any, text: str, **extra: Any) -> int:
    """Ask, and return the number of the prompt's tokens."""
    messages = [{"role": "user", "content": text}]
    answer = asking.chat.completions.create(model="tiny", messages=messages, max_tokens=2, extra_body=extra)
    return int(answer.usage.prompt_tokens)


def completion(asking: Any, text: str, **extra: Any) -> int:
    """Ask, and return the number of the prompt's tokens."""
    answer = asking.completions.create(model="tiny", prompt=text, max_tokens=2, extra_body=extra)
    return int(answer.usage.prompt_tokens)


def response(asking: Any, text: str, **extra: Any) -> int:
    """Ask, and return the number of the prompt's tokens."""
    answer = asking.responses.create(model="tiny", input=text, max_output_tokens=2, store=False, extra_body=extra)
    return int(answer.usage.input_tokens)


def released(server: Server) -> tuple[float, float]:
    """Return the numbers of released sessions and of their blocks, after one more request."""
    completion(client(server), "word1")
    sessions, of_them = (server.metric(f"kv_tiering_{name}_released_total") for name in ("sessions", "blocks"))
    return sessions, of_them


def over(session: str) -> dict[str, Any]:
    """Return the parameters that release a session."""
    action = {"action_type": "release", "payload": {"session_id": session}}
    return {"kv_transfer_params": {"kv_tiering": {"hints": [action]}}}


@pytest.mark.parametrize("carrier", ["field", "header", "extra argument"])
@pytest.mark.parametrize(("ask", "repeated"), [(chat, REPEATED), (completion, 1), (response, REPEATED)])
def test_a_session_is_named_and_released_by_each_kind_of_request(
    server: Server, ask: Callable[..., int], repeated: int, carrier: str
) -> None:
    session, text = f"{ask.__name__} {carrier}", words(-(-WORDS // repeated), ask.__name__, carrier)
    asking, before = client(server), released(server)
    if carrier == "header":
        tokens = ask(asking.with_options(default_headers={"X-Session-ID": session}), text)
    else:
        named = {"session_id": session}
        tokens = ask(asking, text, **(named if carrier == "field" else {"vllm_xargs": named}))
    ask(asking, "word2", **over("a session that nobody has named"))
    assert released(server) == before
    ask(asking, "word2", **over(session))
    until(lambda: released(server)[0] > before[0], 60, "the release")
    sessions, of_them = released(server)
    assert sessions == before[0] + 1
    assert of_them == before[1] + tokens // BLOCK


def test_the_example_of_the_guide_ends_its_session(server: Server) -> None:
    before = released(server)
    run_example(server, 1)
    until(lambda: released(server)[0] > before[0], 60, "the release")
    assert server.metric("kv_tiering_hints_ignored_total") == 0


def run_example(server: Server, count: int) -> None:
    """Run the first examples of the guide as one program."""
    examples = blocks(ROOT / "docs" / "guides" / "hints.md", "py")
    assert len(examples) == 2
    exec(compile("".join(examples[:count]).replace(":8000/", f":{server.port}/"), "hints.md", "exec"), {})


@pytest.mark.parametrize("ahead", [True, False])
def test_the_example_of_the_guide_brings_the_blocks_of_a_session_ahead(server: Server, ahead: bool) -> None:
    asking, text = client(server), words(WORDS, "ahead", ahead)
    found = asking.completions.create(
        model="tiny", prompt=text, max_tokens=8, temperature=0, extra_body={"session_id": "conversation 18"}
    )
    block_count = found.usage.prompt_tokens // BLOCK
    for number in range(16):  # together they need all rows
        completion(asking, words(300, "others", ahead, number))
    assert server.reset()
    if ahead:
        before = server.metric("kv_tiering_blocks_prefetched_total")
        run_example(server, 2)
        until(lambda: released(server) and server.metric("kv_tiering_blocks_prefetched_total") > before, 60, "the end")
        assert server.metric("kv_tiering_blocks_prefetched_total") == before + block_count
        assert server.reset()
    slow, loaded = server.metric("kv_tiering_promotions_total", tier="memory"), server.loaded()
    answer = asking.completions.create(model="tiny", prompt=text, max_tokens=8, temperature=0)
    assert answer.choices[0].text == found.choices[0].text
    until(lambda: released(server) and server.loaded() > loaded, 60, "the load")
    assert server.loaded() - loaded == block_count * BLOCK_BYTES
    assert server.metric("kv_tiering_promotions_total", tier="memory") - slow == (0 if ahead else block_count)
