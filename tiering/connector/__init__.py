"""The engine connector's two halves, and what crosses between them."""
