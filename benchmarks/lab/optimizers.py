"""Settings of published exchanges that differ here, so that methods compare at similar bytes."""

from collections.abc import Mapping

from benchmarks.lab.communication import Options
from comm_hooks.config import parse_spec
from comm_hooks.optim.registry import OptimizerEntry

_MEASURED: Mapping[str, Options] = {
    "local_variance_adam": {"density": 1 / 112, "index_code": "rice", "exempt_bits": 16},
    "one_bit_adam": {"block_size": 4096, "scale": "mean"},
    "zero_one_adam": {"block_size": 4096, "scale": "mean"},
    "cd_adam": {"collective": "auto"},
    "micro_adam": {"value_bits": 16},
    "fetch_sgd": {"ratio": 0.004},  # of each of the five rows
    "dgc": {"density": 1 / 64},
    "mu_lo_co": {"exempt_bits": 16},
    "sparse_loco": {"exempt_bits": 16},
}

NOTES: Mapping[str, str] = {
    "local_variance_adam": "normalizes on each rank before it exchanges",
    "low_communication": "rounds for a budget of bits per parameter and step",
    "local_adamw": "LocalRounds: local AdamW, compressed deltas",
    "safl": "sketched deltas of local SGD, Adam on the server",
}
"""Remarks for the table, by the name of the optimizer."""


def exchange_of(entry: OptimizerEntry) -> tuple[str, Options]:
    """Return the compressor of an optimizer's exchange and all settings, as they are measured."""
    settings = {**(entry.published or {}), **_MEASURED.get(entry.name, {})}
    name, options = parse_spec(settings.pop("compressor"), "compressor")
    return name, {**options, **settings}


def needs_of(entry: OptimizerEntry) -> Options:
    """Return the settings of an optimizer's exchange that hold with any compressor."""
    _, settings = exchange_of(entry)
    kept: Options = {key: settings[key] for key in ("collective", "memory") if key in settings}
    if kept.get("memory") == "error_feedback":  # compressors that need it get it
        del kept["memory"]
    return {**entry.needs, **kept}
