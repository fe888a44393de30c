"""FED-LAMB against Fed-AMS and Fed-SGD: many clients, half of them in each round.

The comparison of "Layerwise and Dimensionwise Locally Adaptive Federated Learning" (Karimi, Li &
Li, UAI 2023), section 4::

    python -m benchmarks.studies.fed_lamb            # digits, 80 minutes on one core
    python -m benchmarks.studies.fed_lamb --quick
    python -m benchmarks.studies.fed_lamb --task fashion_mnist --task-option model=mlp \
        --task-option judged=5000 --local-steps 1,5 --points 10 --validation 0.05 --target 0.2

``methods`` says what is compared and how a run goes.
"""
