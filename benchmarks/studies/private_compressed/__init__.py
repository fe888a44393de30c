"""Private training that is compressed, against private training that is not, at equal epsilon.

Every placement of the noise with the compressors that are valid there, several optimizers and
numbers of ranks; beside them the exact exchange, and ranks that train alone::

    python -m benchmarks.studies.private_compressed            # half an hour on one core
    python -m benchmarks.studies.private_compressed --quick

``schemes`` says what is compared, and how a run goes.
"""
