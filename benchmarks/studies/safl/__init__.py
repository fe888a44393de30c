"""SAFL against its peers: sketches of every size, and what else the same bytes buy.

The comparison of "Sketched Adaptive Federated Deep Learning" (Chen, Li & Banerjee), section 5::

    python -m benchmarks.studies.safl            # digits, 15 minutes on one core
    python -m benchmarks.studies.safl --quick

``sketched`` and ``peers`` say how each method is made, ``budget`` which of its settings cost so
many bytes, ``methods`` what is compared, ``figures`` what people read.
"""
