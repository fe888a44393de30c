"""Each way to exchange with more and more ranks.

Simulated, 2 to 1024 ranks in one process: the errors, and the bytes that each rank moves::

    python -m benchmarks.studies.scale             # a quarter of an hour on one core
    python -m benchmarks.studies.scale --quick

``methods`` has the compared methods, ``training`` the simulation.
"""
