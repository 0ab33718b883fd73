"""The adapters that connect the connector's two halves to real engines."""
