"""SAFL against its peers: sketches of every size, and what else the same bytes buy.

The comparison of "Sketched Adaptive Federated Deep Learning" (Chen, Li & Banerjee), section 5::

    python -m benchmarks.studies.safl            # digits, 3 hours on one core
    python -m benchmarks.studies.safl --quick

``budget`` says what sizes cost, ``peers`` how each peer is made for so many bytes, ``methods`` what
is compared.
"""
