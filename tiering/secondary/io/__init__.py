"""The I/O side of a tier: threads, frames, codecs, and the layers around its block store.

Tiers, the rest of ``secondary``, the replay and the commands import it.
It does not import the indexes, which the scheduler's thread owns.
"""
