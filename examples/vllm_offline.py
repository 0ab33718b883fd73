"""vLLM offline with a stack of tiers: two questions, with vLLM's own cache emptied in between.

    KV_CPU_CAPACITY=4GiB KV_DISK_PATH=/var/tmp/kv KV_DISK_CAPACITY=16GiB \\
        python examples/vllm_offline.py org/model --stack configs/cpu-nvme.yaml

The second question finds the document in the CPU tier. Run the example twice with a stack that has a local tier or a
bucket, as this one has. The second run is a new process with an empty CPU tier, and its first question finds the
document on the disk.

``org/model`` is a model's name or a directory with weights and tokenizer. Without an accelerator, set
VLLM_CPU_KVCACHE_SPACE (GiB).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

SENTENCE = "The committee met on a Tuesday and wrote down, at length, what everybody had said. "
QUESTIONS = ("When did the committee meet?", "What did it write down?")
CPU_STACK = Path(__file__).resolve().parent.parent / "configs" / "cpu.yaml"


def transfer_config(stack: str) -> dict[str, Any]:
    """Return vLLM's ``kv_transfer_config``; ``--kv-transfer-config`` takes the same as JSON."""
    return {
        "kv_connector": "TieringConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tiering.engines.vllm",
        "kv_connector_extra_config": {"config": stack},
        "kv_load_failure_policy": "recompute",
    }


def arguments() -> argparse.Namespace:
    """Parse the command line; options that are left out have vLLM's own defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model's name or directory")
    parser.add_argument("--stack", default=str(CPU_STACK), help="the stack's YAML file")
    parser.add_argument("--sentences", type=int, default=100, help="the document's length; about 17 tokens each")
    parser.add_argument(
        "--max-model-len", type=int, help="longest prompt and answer, in tokens; less needs less memory"
    )
    parser.add_argument("--dtype", help="e.g. bfloat16, float32")
    parser.add_argument("--enforce-eager", action="store_true", help="start faster, without compiling")
    return parser.parse_args()


def hits(llm: Any) -> tuple[int, int]:
    """Return the tokens found so far in vLLM's own cache, and those found in the tiers."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return int(values["vllm:prefix_cache_hits"]), int(values["vllm:external_prefix_cache_hits"])


def ask(llm: Any, prompt: str, max_tokens: int = 16) -> str:
    """Return the answer to ``prompt``, and the sources of the prompt's KV."""
    from vllm import SamplingParams

    own, tiers = hits(llm)
    started = time.perf_counter()
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=max_tokens), use_tqdm=False)
    seconds = time.perf_counter() - started
    own, tiers = (after - before for after, before in zip(hits(llm), (own, tiers), strict=True))
    tokens = len(output.prompt_token_ids)
    answer = " ".join(output.outputs[0].text.split())
    return (
        f"{tokens} tokens: {own} from vLLM's own cache, {tiers} from the tiers, {tokens - own - tiers} computed; "
        f"{seconds:.2f} s: {answer}"
    )


def main() -> None:
    """Ask twice about one document, with vLLM's own cache emptied in between."""
    options = arguments()
    from vllm import LLM

    given = {word: value for word in ("max_model_len", "dtype") if (value := getattr(options, word)) is not None}
    llm = LLM(
        options.model,
        enforce_eager=options.enforce_eager,
        disable_log_stats=False,  # The numbers below come from these statistics.
        kv_transfer_config=transfer_config(options.stack),
        **given,
    )
    ask(llm, "Hello")  # The first request has one-time costs, which must not count for the document.
    for number, question in enumerate(QUESTIONS):
        report = ask(llm, f"{SENTENCE * options.sentences}\n\n{question}\n")
        print(f"question {number + 1}: {report}", flush=True)
        if not llm.reset_prefix_cache():  # This empties vLLM's own cache, but not the tiers.
            sys.exit("vLLM did not empty its own cache: a request still runs")
    llm.llm_engine.engine_core.shutdown()  # This ends vLLM's processes.


if __name__ == "__main__":
    main()
