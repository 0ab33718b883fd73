"""The I/O side of a tier: threads, frames, codecs, and the layers around its block store."""
