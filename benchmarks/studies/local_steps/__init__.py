"""What a loss costs in bytes: many local steps, few coordinates, or both.

Every client takes H steps of AdamW on its own part of a text; then compressed deltas are averaged::

    python -m benchmarks.studies.local_steps            # an hour on one core
    python -m benchmarks.studies.local_steps --quick

``methods`` says what is compared, ``equal_loss`` what each needs for the same loss.
"""
