"""Tests of the examples of deployment: dashboard, alert rules, containers."""
