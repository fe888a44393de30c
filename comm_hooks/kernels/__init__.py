"""Operations on every element, one module for each: a plain reference and faster versions.

An :class:`~comm_hooks.kernels.operators.Operator` has a reference of a few lines of torch, and runs
the fastest equivalent for the tensor's device.  On the CPU that is numpy or torch on pieces that
stay in the cache: a pass over a large vector spends most of its time on memory traffic.
"""
