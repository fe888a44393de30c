"""Private optimizers: accuracy against the noise, and against epsilon.

As in the papers of DP-AdamBC (Tang et al., AAAI 2024), DP-MicroAdam, AdaDPS (Li et al., ICML 2022)
and DP^2 (Li et al., ICLR 2023), at the scale of scikit-learn's digits and of the Bible's verses::

    python -m benchmarks.studies.private_optimizers            # half an hour on one core
    python -m benchmarks.studies.private_optimizers --task verses --sigmas 1      # an hour
    python -m benchmarks.studies.private_optimizers --methods ablations --sigmas 1,4
    python -m benchmarks.studies.private_optimizers --spend 1 --sigmas 3,5,8 --batch 117
    python -m benchmarks.studies.private_optimizers --quick

``models`` has the networks, ``data`` says who is private, ``methods`` what is compared.
"""
