"""Administration of tiers for the command line, without an engine.

Tier definitions and commands import it: an engine runs none of it.
"""
