"""The default connector mode: its scheduler half, its worker half, and their messages."""
