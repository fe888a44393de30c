"""Checks of a private step: each tests one property, and reports a fault in one line."""
