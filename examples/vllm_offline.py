"""vLLM offline with a stack of tiers: a long document is asked about, pushed out of vLLM's own cache, and asked about again.

    python examples/vllm_offline.py org/model --stack configs/cpu-nvme.yaml

Run it twice with a stack that has a local tier or a bucket: the second run finds the document's KV there.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

DOCUMENT = "The committee met on a Tuesday and wrote down, at length, what everybody had said. " * 40
QUESTIONS = ("When did the committee meet?", "What did it write down?")


def transfer_config(stack: str) -> dict[str, Any]:
    """All that vLLM must be told; on the command line it is --kv-transfer-config with the same as JSON."""
    return {
        "kv_connector": "TieringConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "tiering.engines.vllm",
        "kv_connector_extra_config": {"config": stack},
        "kv_load_failure_policy": "recompute",
    }


def main() -> None:
    """Ask twice about one document, with vLLM's own cache emptied in between."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model's name or path")
    parser.add_argument("--stack", default="configs/cpu.yaml", help="the stack's YAML file")
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(options.model, kv_transfer_config=transfer_config(options.stack))
    sampling = SamplingParams(temperature=0, max_tokens=32)
    for question in QUESTIONS:
        started = time.perf_counter()
        (output,) = llm.generate([f"{DOCUMENT}\n\n{question}\n"], sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        print(f"{question} {seconds:.2f} s, {output.num_cached_tokens} tokens were not computed:{output.outputs[0].text}")
        llm.reset_prefix_cache()  # vLLM's own cache is empty now; the tiers are not


if __name__ == "__main__":
    main()
