"""The cost of noise from a cryptographic generator.

Adds noise to 8 Mi elements: float32 noise of PyTorch's CPU generator, which is no secret (it keeps
32 bits of a seed, and its tails end at 5.8 standard deviations), and both kinds that private
training has.  Fails if its Gaussian noise takes more than twice as long, at their best; that needs
two cores with nothing else to do.
"""

import torch

from benchmarks.micro.timing import print_head, times_in_turns
from comm_hooks.optim.private import Secret
from comm_hooks.optim.private.noise.discrete import Grid, add_discrete_noise_
from comm_hooks.optim.private.noise.gaussian import add_noise_

_ELEMENTS = 8 << 20
_MOST = 2.0
_REPEATS = 9


def main() -> bool:
    """Print the table; return whether Gaussian noise takes too long."""
    secret, generator = Secret(), torch.Generator()
    tensor = torch.zeros(_ELEMENTS)

    def guessable() -> None:
        tensor.add_(torch.empty(_ELEMENTS).normal_(0.0, 1.0, generator=generator))

    def gaussian() -> None:
        add_noise_([tensor], 1.0, secret.stream("noise", rank=0, step=0))

    def discrete() -> None:
        grid = Grid.of(noise_multiplier=1.0, sensitivity=1.0, elements=_ELEMENTS)
        add_discrete_noise_([tensor], grid, secret.stream("noise", rank=0, step=0))

    kinds = {"float32 of PyTorch": guessable, "Gaussian": gaussian, "discrete": discrete}
    taken = times_in_turns(kinds, _REPEATS)
    print(f"\n{_ELEMENTS:,} elements, {torch.get_num_threads()} threads, best of {_REPEATS}.\n")
    print_head("noise", "ms", "of PyTorch's", "million elements a second")
    usual = min(taken["float32 of PyTorch"])
    for name, times in taken.items():
        ms = min(times)
        print(f"| {name} | {ms:.0f} | {ms / usual:.2f} | {_ELEMENTS / ms / 1e3:.0f} |")
    return min(taken["Gaussian"]) > _MOST * usual
