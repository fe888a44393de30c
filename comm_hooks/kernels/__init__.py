"""The loops over every element, one module per operator: a plain reference and what is faster.

An :class:`~comm_hooks.kernels.operators.Operator` is its reference, which says in a few lines of
torch what is computed, and what computes the same the fastest way that the tensor's device allows.
On the CPU that is numpy or torch on pieces that stay in the cache: most of the time of a pass over
a large vector goes into moving it to and from memory.
"""
