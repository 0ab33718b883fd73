"""The tiers that come with kv-tiering: one module or package per storage medium."""
