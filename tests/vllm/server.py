"""The OpenAI server as users start it: front end, engine core and workers in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm.rig import BLOCK, MAX_LEN, NUM_BLOCKS, Answer, prompt, transfer_config

START_SECONDS = 600.0
"""Longest start of a server; a busy machine needs minutes.

A start that fails is noticed at once, because its process ends.
"""
END_SECONDS = 300.0
"""Longest end after SIGTERM."""
_FORKS = """
from multiprocessing.context import _concrete_contexts as methods
from runpy import run_module
methods["spawn"] = methods["fork"]
run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
"""A server on a CPU whose processes are forked, as by default where no GPU is in use.

On a CPU vLLM spawns them, and each imports vLLM for longer than a test takes.
"""
_PAUSE = threading.Event()


def until(predicate: Callable[[], Any], timeout: float, what: str) -> Any:
    """Return the first true value of ``predicate``; fails after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while not (value := predicate()):
        assert time.monotonic() < end, f"{what} did not happen within {timeout} s"
        _PAUSE.wait(0.05)
    return value


@dataclass
class Server:
    """A running server, whose ``process`` leads a process group of its own."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def call(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        method: str | None = None,
        timeout: float = 300.0,
        replica: int | None = None,
    ) -> bytes:
        """Return the server's reply; ``replica`` selects one of several data-parallel engines."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if replica is not None:
            headers["X-data-parallel-rank"] = str(replica)
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return bytes(reply.read())

    def ask(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int = 8,
        *,
        replica: int | None = None,
        timeout: float = 300.0,
        **extra: Any,
    ) -> list[Answer]:
        """Return the answers to ``prompts``, which are sent as one batch."""
        body = _completion(prompts, max_tokens, extra)
        reply = json.loads(self.call("/v1/completions", body, timeout=timeout, replica=replica))
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        return [Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def stream(self, prompts: Sequence[list[int]], max_tokens: int, **extra: Any) -> Iterator[list[Answer]]:
        """Yield the answers so far, each time that they have grown."""
        answers = [Answer([], []) for _ in prompts]
        data = json.dumps(_completion(prompts, max_tokens, {"stream": True, **extra})).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as reply:
            for line in reply:
                word, _, text = line.decode().strip().partition(": ")
                if word != "data" or text == "[DONE]":
                    continue
                for choice in json.loads(text)["choices"]:
                    if choice["token_ids"]:
                        answers[choice["index"]].tokens.extend(choice["token_ids"])
                        answers[choice["index"]].logprobs.extend(choice["logprobs"]["token_logprobs"])
                yield answers

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's series with these labels."""
        return sum(self.series(name, **labels))

    def series(self, name: str, **labels: str) -> list[float]:
        """Return the values of a metric's series with these labels."""
        values = []
        for line in self.call("/metrics").decode().splitlines():
            found = re.fullmatch(r"([a-zA-Z_:]+)\{(.*)\} (\S+)", line)
            if found and found[1] == name and all(f'{word}="{value}"' in found[2] for word, value in labels.items()):
                values.append(float(found[3]))
        return values

    def loaded(self, **labels: str) -> float:
        """Return the bytes copied from the CPU tier to the blocks of all workers."""
        return self.metric("vllm:kv_offload_total_bytes_total", transfer_type="cpu_to_gpu", **labels)

    def stored(self) -> float:
        """Return the bytes copied from the workers' blocks to the CPU tier."""
        return self.metric("vllm:kv_offload_total_bytes_total", transfer_type="gpu_to_cpu")

    def evict(self, replicas: Sequence[int | None] = (None,)) -> None:
        """Overwrite the workers' blocks with other requests' KV and reset the engine's prefix cache."""
        policy = {"kv_tiering": {"load": False, "store": False}}
        for replica in replicas:
            self.ask(
                [prompt(10_000 + number, 500) for number in range(4)], 1, replica=replica, kv_transfer_params=policy
            )
        self.reset()

    def reset(self, *, tiers: bool = False) -> bool:
        """Reset the engine's prefix cache, with ``tiers`` also the tiers; return vLLM's word of success."""
        reply = self.call(f"/reset_prefix_cache{'?reset_external=true' if tiers else ''}", {}, method="POST")
        return bool(json.loads(reply)["success"])

    def end(self, with_signal: signal.Signals) -> None:
        """Signal the whole group (SIGKILL) or its leader, and wait until all of its processes have ended."""
        if self.process.poll() is None:
            if with_signal is signal.SIGKILL:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.send_signal(with_signal)
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(END_SECONDS)
                raise
        until(lambda: not _group_lives(self.process.pid), END_SECONDS, "the end of the server's processes")


def _completion(prompts: Sequence[list[int]], max_tokens: int, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": list(prompts),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "detokenize": False,
        "ignore_eos": True,
        **extra,
    }


def _group_lives(group: int) -> bool:
    """Return True while the group has a process that is not a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, member_of = stat.read_text().rpartition(")")[2].split()[:3]
            if int(member_of) == group and state not in "ZX":
                return True
    return False


@contextlib.contextmanager
def serve(model: Path, stack: dict[str, Any] | None, log: Path, *options: str, **environment: str) -> Iterator[Server]:
    """A server for ``model``, which gets SIGTERM at the end unless it has ended.

    Args:
        stack: the connector's extra configuration; None: no tiers.
        environment: further variables; with ``SPAWN``, engine core and workers are new processes, which import vLLM.
    """
    from torch.cuda import is_available

    spawns = "SPAWN" in environment or is_available()
    transfers = [] if stack is None else ["--kv-transfer-config", json.dumps(transfer_config(stack))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, *(("-m", "vllm.entrypoints.openai.api_server") if spawns else ("-c", _FORKS))),
        *("--model", str(model), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"),
        *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", str(MAX_LEN)),
        *("--max-num-batched-tokens", "256", "--max-num-seqs", "8", "--return-tokens-as-token-ids"),
        *(*transfers, *options),
    ]
    inherited = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    variables = {**inherited, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "INFO", **environment}
    # A session of its own would be a group of its own for the kernel's scheduler (autogroup), and vLLM's workers spin:
    # bound to all cores, they kept the tests and their object store from running for up to 30 s.
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables, process_group=0)
    server = Server(process, port, log)
    try:
        until(lambda: _answers(server), START_SECONDS, "the start of the server")
        yield server
    finally:
        server.end(signal.SIGTERM)


def _answers(server: Server) -> bool:
    assert server.process.poll() is None, server.log.read_text()[-8000:]
    try:
        server.call("/health", timeout=2)
    except (urllib.error.URLError, OSError):
        return False
    return True
