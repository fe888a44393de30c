"""Optimizers from papers that own an exchange, with their sources and the differences to these.

For their names and options see :mod:`comm_hooks.optim.registry`; import them from
:mod:`comm_hooks.optim`.
"""
