"""Indexes: what is known of a medium, on the scheduler's side."""
