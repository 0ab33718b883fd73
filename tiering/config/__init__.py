"""The stack file: reading it, validating it, and opening the tiers that it describes."""
