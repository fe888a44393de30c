"""Checks of a private step: each looks for one property, and says in words what is wrong."""
