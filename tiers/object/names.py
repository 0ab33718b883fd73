"""Names of objects in a bucket, after the prefix of the options."""

from __future__ import annotations

BLOCKS = "blocks/"
"""Begins the names of block objects."""
DOCUMENTS = "documents/"
"""Begins the names of documents."""
