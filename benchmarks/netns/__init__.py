"""A network for one machine: network namespaces on a bridge, each on a link of a given rate.

``bed`` makes it and starts programs in it, ``guard`` takes it down again, ``links`` shapes rates,
``python -m benchmarks.netns`` does all of that from a shell, and ``check_predictions`` compares
what ``comm-hooks advise`` predicts with what training in such a network takes.
"""

from benchmarks.netns.bed import Bed, Counters, why_not
from benchmarks.netns.links import NetnsError, parse_rate

__all__ = ["Bed", "Counters", "NetnsError", "parse_rate", "why_not"]
