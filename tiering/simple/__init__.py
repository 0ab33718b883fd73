"""The simple scheduler: a CPU pool that mirrors the GPU's pool, without secondary tiers.

Only the engines' adapters import it. Its matches, tables, workers and counters are the connector's.
"""
