"""``python -m benchmarks.audit --script``: the audit of a training script, unchanged.

``audit`` chooses the runs and compares them, ``run`` starts their processes.  In them,
``observer`` records the model (``watched``) and the releases; ``planting`` changes a sample: of a
step's batch (``draws``), of the source of the data set (``sources``), or a client's (``clients``).
``twins`` compares runs that differ in one sample, ``noise`` runs with different secrets.
"""
