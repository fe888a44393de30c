"""``python -m benchmarks.audit --script``: the audit of a training script, unchanged.

``audit`` chooses the runs and compares them, ``run`` starts their processes.  In them,
``observer`` records the model (``watched``) and the releases, and changes one sample of a batch
(``draws``), rows of the source of a data set (``sources``) or a client's message (``clients``).
``twins`` compares runs that differ in one sample, ``noise`` runs with different secrets.
"""
