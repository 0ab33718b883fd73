"""The simple scheduler: a CPU pool that mirrors the GPU's pool, without secondary tiers.

Only the engines' adapters import it. It does not import the default connector.
"""
