"""The medium of a tier: the contract of a block store, frames, codecs, layers, and I/O threads.

Tiers, the rooms above, the replay and the commands import it.
It does not import the indexes, which the scheduler's thread owns.
"""
