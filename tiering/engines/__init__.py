"""Adapters: how a real engine drives the connector's two halves."""
