"""The connector: matches, block tables and copies of both modes, and the scheduler over tiers.

Only the simple scheduler and the engines' adapters import it.
"""
