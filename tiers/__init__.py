"""The media, one each."""
