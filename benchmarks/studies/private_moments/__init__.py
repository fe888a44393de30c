"""DP-AdamBC's second moment: what noise does to it, and what is left after the correction.

Stationary coordinates with gradients of known strength go through the library's mechanism and
optimizer; what v_hat holds is compared with what theory says, as in sections 3 and 4 of Tang,
Shpilevskiy & Lecuyer, "DP-AdamBC" (AAAI 2024)::

    python -m benchmarks.studies.private_moments            # two minutes on one core
    python -m benchmarks.studies.private_moments --quick

``measure`` says what is measured.
"""
