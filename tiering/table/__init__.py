"""The table of rows or slots, and the eviction policies that order it.  Imports ``tiering.api`` and the errors."""
