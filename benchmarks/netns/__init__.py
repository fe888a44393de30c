"""A network for one machine: network namespaces on a bridge, each on a link of a given rate.

``testbed`` makes the network and starts programs in it, ``guard`` removes it and ``links`` limits
rates. ``python -m benchmarks.netns`` runs a command on such links.
"""

from benchmarks.netns.links import NetnsError
from benchmarks.netns.testbed import Counters, Testbed, why_not
from comm_hooks.launchers.rates import parse_rate

__all__ = ["Counters", "NetnsError", "Testbed", "parse_rate", "why_not"]
