"""The CPU tier: the only one that the accelerator touches."""
