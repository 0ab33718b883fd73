"""``examples/vllm_offline.py`` run twice as a user runs it, with a tokenizer and a stack file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.vllm.models import VOCABULARY, write_llama

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = 128
"""Tokens of a block, vLLM's default on its CPU platform."""


def write_readable_llama(directory: Path) -> Path:
    """Write a Llama with room for a document, and a byte-level tokenizer; return ``directory``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    write_llama(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(textwrap.__file__).read_text()], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)
    return directory


def run_example(model: Path, stack: Path) -> tuple[list[tuple[int, int, int, int]], list[str], str]:
    """Run the example and return the numbers of each question, the answers, and the whole output.

    The numbers are tokens: of the prompt, from vLLM's own cache, from the tiers, computed.
    """
    command = [sys.executable, "examples/vllm_offline.py", str(model), "--stack", str(stack), "--sentences", "40"]
    command += ["--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    line = (
        r"^question \d: (\d+) tokens: (\d+) from vLLM's own cache, (\d+) from the tiers, (\d+) computed; "
        r"[\d.]+ s: (.+)$"
    )
    found = re.findall(line, done.stdout, flags=re.MULTILINE)
    numbers = [(int(tokens), int(own), int(tiers), int(computed)) for tokens, own, tiers, computed, _ in found]
    return numbers, [answer for *_, answer in found], done.stdout


def test_the_second_question_and_the_second_run_find_the_document(tmp_path: Path) -> None:
    model = write_readable_llama(tmp_path / "model")
    stack = tmp_path / "stack.yaml"
    disk = tmp_path / "disk"
    stack.write_text(f"primary: {{capacity: 64MiB}}\nsecondary:\n  - {{type: local, path: {disk}, capacity: 64MiB}}\n")

    (first, second), answers, printed = run_example(model, stack)
    document = first[0] // BLOCK * BLOCK - BLOCK  # the last whole block may contain the first words of the question
    assert document > 8 * BLOCK
    assert first[1:3] == (0, 0)
    assert second[1] == 0
    assert second[2] >= document
    assert second[0] == sum(second[1:])
    line = r"^\(EngineCore .* INFO .*\] "
    assert re.search(line + "tiers: primary .*, local 64 MiB$", printed, flags=re.MULTILINE)
    (named,) = re.findall(
        line + "tiers that outlive the process: namespace ([0-9a-f]{8})$", printed, flags=re.MULTILINE
    )
    assert [path.name[10:18] for path in disk.glob("documents/namespace-*.json")] == [named]

    restarted, answers_again, _ = run_example(model, stack)
    assert [own for _, own, _, _ in restarted] == [0, 0]
    assert restarted[0][2] >= document  # the CPU tier began empty, so these tokens came from the disk
    assert answers_again == answers
