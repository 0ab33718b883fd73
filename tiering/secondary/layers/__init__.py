"""Layers around a block store: one concern each, same interface, stacked."""
