"""The eviction policies, one per file.

The table and the owners of a table import them; a policy imports no table.
"""
