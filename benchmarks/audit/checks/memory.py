"""Is a sample released in its own steps only, and under noise?

Steps are played twice by the same secrets, with and without a change of some sums: the difference
is the effect of the change, without any noise.  Played by other secrets, nothing may be the same.
"""

import os
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils import _pytree as pytree

from benchmarks.audit.checks.chances import chance, smallest_energy
from benchmarks.audit.checks.noise import claimed_deviation, gain_of
from benchmarks.audit.configuration import Stages
from benchmarks.audit.world import SHAPES, World, fixed_secrets, parts_of, twins, user_seed
from comm_hooks.compressors.identity import Identity

_PROCESSES = (60, 30)
_FEW = (7, 4)
_REPLAYED = (5, 4)
_BUSY = 4
_SLACK = 1e-3
_ROUNDING = 1e-5
_NO_NOISE = 1e-6
# Next to no float32 numbers are equal by chance.
_MOST_SAME = 4
_MOST_SAME_SHARE = 0.1
_PARTS = parts_of(SHAPES)
_NUMEL = _PARTS[-1][2]


def check_memory(stages: Stages) -> Iterator[str]:
    """Yield the faults of residuals and other kept state, one line each."""
    problems = _changes(stages, dense=True)
    exchange = World(stages, {"weight": (8, 8)}, stages.configuration.noise_multiplier).exchanges[0]
    if not problems and exchange.compressor != Identity():
        if exchange.memory is None:
            problems += _changes(stages, dense=False)
        if exchange.compressor.linear and not exchange.compressor.per_rank:
            problems += _masked_noise(stages)
    yield from problems
    yield from _without_noise(stages)


def _invent(stages: Stages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums for each step, (steps, N, d), and changes of some of them."""
    rng = np.random.default_rng()
    steps, ranks = sum(_PROCESSES), stages.configuration.world_size
    sums, changes = torch.zeros(2, steps, ranks, _NUMEL)

    def unit(numel: int) -> torch.Tensor:
        vector = torch.from_numpy(rng.standard_normal(numel))
        return (vector / vector.norm()).float()

    for step in range(steps):
        for rank in range(ranks):
            length = 1e4 if step == 1 else float(rng.choice([0.0, 0.0, 0.5, 3.0, 20.0]))
            sums[step, rank] = unit(_NUMEL) * length
        # A restart brings back the state that was saved last.
        is_last, is_first = step == _PROCESSES[0] - 1, step == _PROCESSES[0]
        if is_last or (step != 1 and not is_first and rng.random() < 0.25):
            _, begin, end = _PARTS[int(rng.integers(len(_PARTS)))]
            begin, end = [(0, _NUMEL), (begin, end), (end - 1, end)][int(rng.integers(3))]
            changes[step, int(rng.integers(ranks)), begin:end] = unit(end - begin)
    return sums * stages.configuration.max_grad_norm, changes * stages.configuration.max_grad_norm


def _changes(stages: Stages, *, dense: bool) -> list[str]:
    """Change some sums, and compare the releases of all steps."""
    sums, changes = _invent(stages)
    sigma, norm = stages.configuration.noise_multiplier, stages.configuration.max_grad_norm

    def play(changed: bool, noise: float = 1.0) -> torch.Tensor:
        world = World(stages, SHAPES, sigma * noise, dense=dense)
        released = []
        for _, clean, change in zip(world.steps(*_PROCESSES), sums, changes, strict=True):
            world.sums().copy_(clean + change if changed else clean)
            released.append(world.release())
        return torch.stack(released)

    # Without twins (draws from an unknown source) play with almost no noise.
    without, with_it = twins(play) or (play(False, _NO_NOISE), play(True, _NO_NOISE))
    factor = abs(gain_of(without, sums.sum(1))) if dense else 1.0
    rounding = _ROUNDING * torch.linalg.vector_norm(without, dim=1) / factor
    found = torch.linalg.vector_norm(with_it - without, dim=1) / factor - rounding
    is_in = changes.flatten(1).any(1)
    again = torch.where(is_in, 0.0, found).nan_to_num(torch.inf) / norm
    most = torch.where(is_in, found, 0.0).nan_to_num(torch.inf) / norm
    if again.max() > _SLACK:
        step = int((again > _SLACK).nonzero()[0])
        since = int(is_in[:step].nonzero()[-1]) if is_in[:step].any() else step
        return [
            f"a sample in the sum of step {since + 1} changes the release of step {step + 1}, in "
            f"which it is not, by {float(again[step]):.2g} C (and of "
            f"{int((again > _SLACK).sum()) - 1} more steps): keep no vector without noise"
        ]
    if dense and most.max() > 1 + _SLACK:
        step = int(most.argmax())
        rank = int(changes[step].any(1).nonzero()[0])
        return [
            f"a change of C in the sum of rank {rank} changes the release by "
            f"{float(most[step]):.3g} C: noise must depend on no data, and ranks must have equal "
            f"weights (step {step + 1})"
        ]
    return []


def _masked_noise(stages: Stages) -> list[str]:
    """Compare the noise with a linear map of noised sums, for each coordinate.

    If A_j maps T sums at coordinate j to T releases, noised sums release noise of covariance
    sigma^2 A_j A_j^T.  Smaller noise means that clean sums were compressed and kept.
    """
    configuration = stages.configuration
    sigma, ranks, norm = (
        configuration.noise_multiplier,
        configuration.world_size,
        configuration.max_grad_norm,
    )
    steps = sum(_FEW)
    of_rank = torch.arange(_NUMEL) % ranks
    sizes = torch.from_numpy(np.random.default_rng().uniform(0.5, 2.0, (2, _NUMEL))).float()

    def play(at: int | None, size: torch.Tensor, noise: float) -> torch.Tensor:
        world = World(stages, SHAPES, sigma * noise)
        released = []
        for step, _ in enumerate(world.steps(*_FEW)):
            sums = world.sums()
            if step == at:
                sums[of_rank, torch.arange(_NUMEL)] = size * norm
            released.append(world.release())
        return torch.stack(released) / norm

    responses = torch.stack([play(t, sizes[0], _NO_NOISE) / sizes[0] for t in range(steps)])
    if not torch.allclose(play(0, sizes[1], _NO_NOISE) / sizes[1], responses[0], atol=1e-2):
        return []  # a sketch: coordinates are mixed
    # (numel, steps out, steps in)
    maps = responses.permute(2, 1, 0).double()
    values, vectors = torch.linalg.eigh(maps @ maps.transpose(1, 2))
    noise = play(None, sizes[0], 1.0).T.double() * (norm / claimed_deviation(stages, sigma))
    white = (vectors.transpose(1, 2) @ noise[:, :, None])[:, :, 0]
    seen = values > 1e-2
    energy = torch.where(seen, white.square() / values.clamp(min=1e-2), 0.0)
    groups = [("", 0, _NUMEL), *_PARTS]
    allowed = chance("compressed: energy", len(groups))
    for name, start, end in groups:
        terms = int(seen[start:end].sum())
        found = float(energy[start:end].sum()) / max(1, terms)
        if terms and not found >= smallest_energy(terms, allowed):
            return [
                f"the compressed releases have {found:.2f} times the variance of noised sums"
                f"{f' in {name}' if name else ''}: add the noise before the compressor, and keep "
                "only noised residuals"
            ]
    return []


def _without_noise(stages: Stages) -> list[str]:
    """Play the same data by two secrets, and other data: numbers of the data alone are clean."""
    configuration = stages.configuration
    deviation = configuration.noise_multiplier * configuration.max_grad_norm
    shape = (2, sum(_REPLAYED), configuration.world_size, _NUMEL)
    data = torch.from_numpy(np.random.default_rng().standard_normal(shape)).float() * deviation
    data[:, _BUSY:] = 0

    def play(sums: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        world = World(stages, SHAPES, configuration.noise_multiplier)
        for step, _ in enumerate(world.steps(*_REPLAYED)):
            world.sums().copy_(sums[step])
            yield f"released in step {step + 1}", world.release()
            for sent in world.sent if configuration.placement in ("shares", "local") else ():
                for rank, message in enumerate(sent):
                    yield f"that rank {rank} sends in step {step + 1}", message
            for rank, exchange in enumerate(world.exchanges):
                for leaf in pytree.tree_leaves(exchange.state_dict()):
                    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                        what = f"that rank {rank} keeps in its exchange after step {step + 1}"
                        yield what, leaf.flatten().clone()

    key = int.from_bytes(os.urandom(8), "little")
    plays = []
    for sums, secret in ((data[0], key), (data[0], key + 1), (data[1], key)):
        with fixed_secrets(secret), user_seed():
            plays.append(list(play(sums)))
    for (what, one), (_, two), (_, three) in zip(*plays, strict=False):
        if not one.shape == two.shape == three.shape or one.dtype.itemsize < 4:
            continue
        clean = (one == two) & (one != three) & (one != 0) & one.isfinite()
        if int(clean.sum()) >= max(_MOST_SAME, _MOST_SAME_SHARE * int((one != 0).sum())):
            return [
                f"{int(clean.sum())} of {clean.numel()} numbers {what} depend on the data and not "
                "on the secret: they have no noise"
            ]
    return []
