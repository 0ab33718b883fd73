"""Layers around a block store, each with one concern.

Only :mod:`tiering.medium.host` stacks them; others import single parts, such as the breaker.
"""
