"""Names of objects in a bucket, after the prefix of the options."""

from __future__ import annotations

BLOCKS = "blocks/"
"""Begins the names of block objects."""
DOCUMENTS = "documents/"
"""Begins the names of documents."""
SUSPECTS = "suspect-"
"""Begins the names of the documents that note an object which a machine reads corrupt."""
SETTLEMENTS = "settled-"
"""Begins the names of the documents by which the fleet counts the corrupt objects that it deletes."""
IDENTITY = "bucket-id"
"""Name of the document that holds the bucket's identifier; a successor has a number behind it."""
