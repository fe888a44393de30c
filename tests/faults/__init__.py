"""Faults on purpose: one rank of a training run misbehaves, and the others must notice.

``python -m tests.faults`` injects them all; ``test_faults.py`` a few of them.
"""
