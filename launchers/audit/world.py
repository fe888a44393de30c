"""A world of simulated ranks that take private steps and are started again in between."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from comm_hooks.collectives.simulated import Simulated
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.launchers.audit.stages import Mechanism, Stages

# What a user would set at the start of every process: nothing private may follow from it.
_USER_SEED = 42


class World:
    """All ranks of a private training, in one process.

    Args:
        stages: what makes the parts.
        shape: of all parameters together, (P, ...): P parameters of equal shape.
        noise_multiplier: sigma; a tiny one shows what is released of the data itself.
        dense: whether to do without the configuration's compressor.
    """

    def __init__(
        self,
        stages: Stages,
        shape: tuple[int, ...],
        noise_multiplier: float,
        *,
        dense: bool = False,
    ) -> None:
        self._stages = stages
        self._noise_multiplier = noise_multiplier
        self._dense = dense
        self._simulated = Simulated(stages.configuration.world_size)
        self._exchanges: list[Exchange] = []
        self._mechanisms: list[Mechanism] = []
        self._sums = torch.zeros(self._simulated.world_size, *shape)
        names = [f"parameter {i}" for i in range(shape[0])]
        self._by_name = [dict(zip(names, sums, strict=True)) for sums in self._sums]
        self.start()

    def start(self) -> None:
        """Start all processes (again): state is loaded, and the seed is that of last time."""
        states = [exchange.state_dict() for exchange in self._exchanges]
        with user_seed():
            self._generator_state = torch.get_rng_state()
            self._exchanges = [self._make_exchange(rank) for rank in range(len(self._sums))]
            self._mechanisms = [
                self._stages.mechanism(exchange, self._noise_multiplier)
                for exchange in self._exchanges
            ]
        for exchange, state in zip(self._exchanges, states, strict=False):
            exchange.load_state_dict(state)

    def sums(self) -> torch.Tensor:
        """Return all ranks' clipped sums, zeros (N, P, ...), to be filled in before a release."""
        return self._sums.zero_()

    def release(self) -> torch.Tensor:
        """Take a step with the sums that were filled in; return what is released, times B."""
        rounds = [m.round(s) for m, s in zip(self._mechanisms, self._by_name, strict=True)]
        # Whatever draws from PyTorch's own generator draws what the user's seed makes of it.
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="world size is 1")
            torch.set_rng_state(self._generator_state)
            released = self._simulated.run(rounds)[0].tensors
            self._generator_state = torch.get_rng_state()
        batch = self._stages.configuration.expected_batch_size
        return torch.stack(list(released.values())) * batch

    def _make_exchange(self, rank: int) -> Exchange:
        if not self._dense:
            exchange = self._stages.exchange(self._simulated[rank])
            # Canaries' parameters are small, and are to be compressed all the same.
            exchange.min_numel = 1
            return exchange
        return Exchange(Identity(), transport=self._simulated[rank])


@contextmanager
def user_seed() -> Iterator[None]:
    """Do something under the seed that a user sets in every process, and undo it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_USER_SEED)
        yield
