"""The tiers that come with kv-tiering: one module or package per storage medium.

The framework does not import them: the registry names them as text, and a stack opens those it lists.
"""
