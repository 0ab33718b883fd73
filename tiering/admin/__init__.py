"""Administration of tiers for the command line: its contract, collection, namespaces, verification.

Commands and the tiers' administrations import it: an engine runs none of it.
"""
