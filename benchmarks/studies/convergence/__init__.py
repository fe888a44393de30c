"""The rates that three papers state: squared gradients against steps, and against clients.

Theorem 1 of DP-MicroAdam (Hudisteanu, Cyffers & Kalinin), Theorem 3.2 of SAFL (Chen, Li & Banerjee)
and the introduction of FED-LAMB (Karimi, Li & Li, UAI 2023) bound the mean squared gradient of T
steps of length c / sqrt(T) by O(1 / sqrt(T)), FED-LAMB's by O(1 / sqrt(n T)) with n clients.  Here
are quadratics with noisy gradients::

    python -m benchmarks.studies.convergence            # half an hour on one core
    python -m benchmarks.studies.convergence --quick

``descent`` says what is measured, ``methods`` what is compared.
"""
