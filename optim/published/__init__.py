"""Published algorithms that own their exchange, each with its source and its differences to it.

To choose one, see :mod:`comm_hooks.optim.registry`; all of them are in :mod:`comm_hooks.optim`.
"""
