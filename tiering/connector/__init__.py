"""The default connector mode: its scheduler half, its worker half, and their messages.

Only the engines' adapters import it. It does not import the simple scheduler.
"""
