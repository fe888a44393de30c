"""SAFL with a sketch of any family and size, or none."""

import math

from benchmarks.studies.training import Build, Client, NamedParameters
from comm_hooks.collectives import Transport
from comm_hooks.compressors import SRHT, Compressor, CountSketch, GaussianSketch
from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.algorithms import SAFL

FAMILIES = ("count_sketch", "srht", "gaussian_sketch")
SERVERS = ("adam", "amsgrad")

BETAS = (0.9, 0.99)
"""Of all adaptive methods.  A run of a hundred rounds is too short for 0.999."""

LOCAL_LR = 0.1

_MATRIX = 1 << 19


def make_sketch(family: str, ratio: float) -> Compressor:
    """Return a sketch of that ratio."""
    if family == "count_sketch":
        return CountSketch(ratio)
    if family == "srht":
        return SRHT(ratio)
    # Blocks as large as a matrix of half a million numbers allows, so that a small sketch has
    # the whole model in one block, and a large one does not take minutes.
    return GaussianSketch(ratio, block_size=max(1, math.isqrt(round(_MATRIX / ratio))))


def build_safl(
    compressor: Compressor,
    *,
    lr: float,
    local_steps: int,
    weight_decay: float,
    amsgrad: bool,
    seed: int,
) -> Build:
    """Return what makes a client of SAFL; without a sketch (Identity) it is FedOPT."""

    def build(parameters: NamedParameters, transport: Transport) -> Client:
        exchange = Exchange(compressor, granularity="bucket", seed=seed, transport=transport)
        rounds = SAFL(
            parameters,
            exchange,
            lr=lr,
            local_lr=LOCAL_LR,
            local_steps=local_steps,
            betas=BETAS,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )
        return Client(rounds, exchange, rounds.server)

    return build
