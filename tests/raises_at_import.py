"""A module that a stack may name and that cannot be imported."""

raise OSError("this module cannot be imported")
