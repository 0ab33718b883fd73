"""Layers around a block store, each with one concern."""
