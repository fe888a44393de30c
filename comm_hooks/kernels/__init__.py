"""The loops over every element, one module per operator: a plain reference and what is faster.

A module has a ``reference_*`` function, which says in a few lines of torch what is computed, and
public functions of the same arguments, which compute it the fastest way that the tensor's device
allows.  On the CPU that is numpy or torch on pieces that stay in the cache: most of the time of a
pass over a large vector goes into moving it to and from memory.
"""
