"""The generic tier, over an index and a block store: definition, admission, jobs, events, life.

The API for authors of tiers and the tiers import it; the manager does not.
"""
