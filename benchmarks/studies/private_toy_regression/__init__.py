"""Side information where it matters most: rare features that carry everything.

The regression of Section 4.1 of AdaDPS (Li et al., ICML 2022), with DP-SGD and private adaptive
methods beside it, and once more without privacy::

    python -m benchmarks.studies.private_toy_regression          # a quarter of an hour on one core
    python -m benchmarks.studies.private_toy_regression --quick

``problem`` is the regression, and says what the paper leaves open; ``methods`` says what is
compared.
"""
