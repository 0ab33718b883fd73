"""The table of rows or slots, and the eviction policies that order it.

This package imports only ``tiering.api`` and the errors.
"""
