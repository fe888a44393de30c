"""One round on flat vectors, no framework in sight: its settings, its buckets and its routes."""

from comm_hooks.exchange.exchange import Exchange, largest_in
from comm_hooks.exchange.settings import Collective, ExchangeSettings

__all__ = ["Collective", "Exchange", "ExchangeSettings", "largest_in"]
