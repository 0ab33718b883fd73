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
    with serve(model, {"primary": {"capacity": 128 * BLOCK_BYTES}}, directory / "log", *options) as running:
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
    example, *_ = blocks(ROOT / "docs" / "guides" / "hints.md", "py")
    before = released(server)
    exec(compile(example.replace(":8000/", f":{server.port}/"), "hints.md", "exec"), {})
    until(lambda: released(server)[0] > before[0], 60, "the release")
    assert server.metric("kv_tiering_hints_ignored_total") == 0
