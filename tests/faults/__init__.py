"""Faults on purpose: what the ranks of a training run do when one of them does what it should not.

``python -m tests.faults`` injects them all; ``test_faults.py`` a few of them.
"""
