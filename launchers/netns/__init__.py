"""A network for one machine: network namespaces on a bridge, each on a link of a given rate.

``bed`` makes it and starts programs in it, ``guard`` takes it down again and ``links`` shapes
rates.  ``comm-hooks bench`` trains in it.
"""

from comm_hooks.launchers.netns.bed import Bed, Counters, why_not
from comm_hooks.launchers.netns.links import NetnsError
from comm_hooks.launchers.rates import parse_rate

__all__ = ["Bed", "Counters", "NetnsError", "parse_rate", "why_not"]
