"""Administration of tiers for the command line: its contract, collections, namespaces.

Commands and the tiers' administrations import it: an engine runs none of it.
"""
