"""Epochs: the documents that name a medium's valid blocks, and a tier's way from one to the next.

Only the generic tier, the administration and the tiers' own parts import it.
"""
