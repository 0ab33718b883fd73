"""Layers around a block store, each with one concern.

Only ``tiering.medium.assembly`` stacks them; others import single parts, such as the breaker.
"""
