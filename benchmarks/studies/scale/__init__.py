"""What becomes of each way to exchange when there are more and more ranks.

Simulated, 2 to 1024 ranks in one process: what is learnt, and the bytes that each rank moves; then
step times of large models on up to 4096 ranks as the cost model predicts them::

    python -m benchmarks.studies.scale             # a quarter of an hour on one core
    python -m benchmarks.studies.scale --quick
    python -m benchmarks.studies.scale --only predicted

``methods`` says what is compared, ``training`` how ranks are simulated, and ``predicted`` what the
predictions rest on.
"""
