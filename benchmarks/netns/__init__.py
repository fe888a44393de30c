"""A network for one machine: network namespaces on a bridge, each on a link of a given rate.

``testbed`` makes the network and starts programs in it, ``guard`` removes it and ``links`` limits
rates. ``python -m benchmarks.netns`` runs a command on such links.
"""

from benchmarks.netns.links import NetnsError
from benchmarks.netns.testbed import Testbed, why_not

__all__ = ["NetnsError", "Testbed", "why_not"]
