"""Copies between the accelerator and primary rows.

The spec, and the connector modes with their shared code, import it; the manager and the tiers do not.
"""
