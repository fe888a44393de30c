"""SAFL's headline: rounds grow with the intrinsic dimension, not with the number of parameters.

Quadratics of 1,024 to 65,536 parameters whose Hessian's eigenvalues are all equal, or fall by a
power law, and the rounds that SAFL with a sketch of one size, and peers that send as many bytes,
take to a tenth of the loss::

    python -m benchmarks.studies.safl_dimension            # a quarter of an hour on one core
    python -m benchmarks.studies.safl_dimension --quick

``benchmarks.studies.quadratics`` says what is minimized, ``methods`` what is compared.
"""
