"""What is shipped for testing: the conformance suite, faults, a fake clock."""
