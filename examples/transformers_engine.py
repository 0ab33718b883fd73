"""An engine: transformers' ``generate`` with the KV of earlier prompts from a stack of tiers.

python -m examples.transformers_engine MODEL_DIRECTORY stack.yaml
"""

import hashlib
import math
import sys
from pathlib import Path

import torch
import transformers

import tiering

BLOCK = 16  # Tokens per block.


class Engine:
    """A causal language model with keys and values per token in every layer; greedy, one prompt at a time."""

    def __init__(self, directory: Path, stack: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
        digest = hashlib.sha256()  # The content of the model's files says which KV is its own.
        for file in sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors", ".bin")):
            digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        config = self.model.config
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._shape = config.num_hidden_layers, 2, config.num_key_value_heads, size  # Of a token; the 2: keys, values.
        identity = tiering.ModelIdentity(directory.name, digest.hexdigest(), str(self.model.dtype), f"{BLOCK} tokens")
        block_bytes = math.prod(self._shape) * BLOCK * self.model.dtype.itemsize
        self.manager = tiering.open_manager(tiering.load_stack(stack), block_bytes, identity)
        self.cached = 0

    @torch.inference_mode()
    def generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Return the tokens that follow ``prompt``; ``cached`` of its tokens came from the tiers."""
        keys = tiering.prompt_keys(prompt[:-1], BLOCK)  # At least the last token is computed.
        shape, context = (len(keys), BLOCK, *self._shape), tiering.ReqContext("the only request at its time")
        blocks = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        hits = tiering.load_prefix(self.manager, keys, context, lambda n, row: tiering.unpack_block(row, [blocks[n]]))
        self.cached, cache = hits * BLOCK, transformers.DynamicCache()
        for layer, (k, v) in enumerate(blocks[:hits].flatten(0, 1).permute(1, 2, 3, 0, 4)[:, :, None]) if hits else ():
            cache.update(k, v, layer)
        ids = torch.tensor([prompt], device=self.model.device)
        words = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new_tokens, "do_sample": False}
        tokens: list[int] = self.model.generate(ids, past_key_values=cache, **words)[0].tolist()
        kv = torch.stack([torch.cat([layer.keys, layer.values]) for layer in cache.layers]).permute(3, 0, 1, 2, 4)
        keys = tiering.prompt_keys(tokens[: len(kv)], BLOCK)
        blocks = kv[: len(keys) * BLOCK].reshape(-1, BLOCK, *self._shape)
        tiering.store_prefix(self.manager, keys, context, lambda n, row: tiering.pack_block(row, [blocks[n]]))
        return tokens[len(prompt) :]


if __name__ == "__main__":
    engine = Engine(*(Path(word) for word in sys.argv[1:]))
    with engine.manager:
        for _ in range(2):
            print(engine.generate(list(range(100)), 8), f"{engine.cached} of 100 prompt tokens came from the tiers")
