"""A model built from a changed copy of its configuration, as language models in other models are."""

from __future__ import annotations

import copy
from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM


class NestedLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose norm depends on ``override_generation_config``, in the copy only."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        model_config = vllm_config.model_config
        part = copy.deepcopy(model_config.hf_config)
        part.rms_norm_eps = model_config.override_generation_config.get("norm", part.rms_norm_eps)
        super().__init__(vllm_config=vllm_config.with_hf_config(part, part.architectures), prefix=prefix)
