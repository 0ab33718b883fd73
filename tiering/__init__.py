"""kv-tiering: a multi-tier KV-cache hierarchy for LLM inference."""
