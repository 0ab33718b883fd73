"""A tiny inference engine with a real paged KV cache, small enough to read in half an hour.

Reading order: ``tokenizer`` → ``model`` → ``request`` → ``kv_cache`` → ``scheduler`` → ``worker`` → ``engine``, and
``tiers`` for how a stack of tiers is connected. Its results do not depend, to the last bit, on batching, chunking or
on what was cached: so any wrong KV block shows.
"""

from examples.mini_engine.engine import Engine, EngineOptions, Output
from examples.mini_engine.model import ModelConfig
from examples.mini_engine.request import Request
from examples.mini_engine.tokenizer import Tokenizer

__all__ = ["Engine", "EngineOptions", "ModelConfig", "Output", "Request", "Tokenizer"]
