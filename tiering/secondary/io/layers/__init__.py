"""Layers around a block store, each with one concern.

Only ``tiering.secondary.io.assembly`` stacks them; others import single parts, such as the breaker.
"""
