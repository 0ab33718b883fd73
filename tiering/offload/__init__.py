"""Code shared by both connector modes: engine protocols, KV events, reports, statistics and metrics.

Only the two connector modes and the engines' adapters import it.
"""
