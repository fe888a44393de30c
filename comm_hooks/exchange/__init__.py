"""Average named tensors over ranks through a compressor: settings, buckets, routes, state."""

from comm_hooks.exchange.exchange import Exchange, largest_in
from comm_hooks.exchange.settings import Collective, ExchangeSettings

__all__ = ["Collective", "Exchange", "ExchangeSettings", "largest_in"]
