"""The Hessian's spectrum of a network that SAFL trains, and its intrinsic dimension.

What SAFL's theory leans on (Chen, Li & Banerjee, Assumption 4 and Figures 4 and 5), measured on the
networks of the studies, for digits and Fashion-MNIST::

    python -m benchmarks.studies.safl_spectrum
    python -m benchmarks.studies.safl_spectrum --task fashion_mnist     # a vision transformer
    python -m benchmarks.studies.safl_spectrum --quick

``lanczos`` says how a spectrum is estimated.
"""
