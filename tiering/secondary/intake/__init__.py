"""Intake of a tier: its admission policy, its budget of bytes, and its offers."""
