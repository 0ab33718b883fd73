"""The stack file: reading, validating, and opening what it describes."""
