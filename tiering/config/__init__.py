"""The stack file: reading it, validating it, and opening the tiers that it describes.

The spec, the replay, the simple scheduler, the adapters and the commands import it; tiers and the manager do not.
"""
