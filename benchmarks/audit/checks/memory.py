"""Is a sample released in the steps that it is in, under noise, and never again?

Steps are played twice by the same secrets, with and without a change of some sums: what differs is
exactly what the change did, without any noise.  Played by other secrets, nothing may be the same.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.audit.checks.chances import chance, smallest_energy
from benchmarks.audit.checks.noise import claimed_deviation, gain_of
from benchmarks.audit.stages import Stages
from benchmarks.audit.world import (
    SHAPES,
    World,
    fixed_secrets,
    parts_of,
    twins,
    user_seed,
)
from comm_hooks.compressors.identity import Identity

_PROCESSES = (60, 30)
_FEW = (7, 4)
_REPLAYED = (5, 4)
_BUSY = 4
_SLACK = 1e-3
_ROUNDING = 1e-5
_NO_NOISE = 1e-6
# Of float32 numbers without noise in common next to none are the same by chance.
_MOST_SAME = 4
_MOST_SAME_SHARE = 0.1
_EXACT = (torch.float32, torch.float64)


def check_memory(stages: Stages) -> list[str]:
    """Return what is released of data that are no longer there, or without noise, in words."""
    problems = _changes(stages, dense=True)
    exchange = World(stages, {"weight": (8, 8)}, stages.configuration.noise_multiplier).exchanges[0]
    if not problems and exchange.compressor != Identity():
        if exchange.memory is None:
            problems += _changes(stages, dense=False)
        if exchange.compressor.linear and not exchange.compressor.per_rank:
            problems += _masked_noise(stages)
    return problems + _without_noise(stages)


def _invent(stages: Stages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums for each step, (steps, N, d), and changes of some of them."""
    rng = np.random.default_rng()
    parts = parts_of(SHAPES)
    steps, ranks, numel = sum(_PROCESSES), stages.configuration.world_size, parts[-1][2]
    sums = torch.zeros(steps, ranks, numel)
    changes = torch.zeros(steps, ranks, numel)
    for step in range(steps):
        for rank in range(ranks):
            length = 1e4 if step == 1 else float(rng.choice([0.0, 0.0, 0.5, 3.0, 20.0]))
            sums[step, rank] = _of_length(rng, numel) * length
        # What is saved last is what a restart brings back.
        is_last, is_first = step == _PROCESSES[0] - 1, step == _PROCESSES[0]
        if is_last or (step != 1 and not is_first and rng.random() < 0.25):
            _, begin, end = parts[int(rng.integers(len(parts)))]
            change = changes[step, int(rng.integers(ranks))]
            kind = rng.integers(3)
            if kind == 0:
                change.copy_(_of_length(rng, numel))
            elif kind == 1:
                change[begin:end] = _of_length(rng, end - begin)
            else:
                change[end - 1] = 1.0
    norm = stages.configuration.max_grad_norm
    return sums * norm, changes * norm


def _of_length(rng: np.random.Generator, numel: int) -> torch.Tensor:
    vector = torch.from_numpy(rng.standard_normal(numel))
    return (vector / vector.norm()).float()


def _changes(stages: Stages, *, dense: bool) -> list[str]:
    """Change some sums, and look at what is released in all steps."""
    sums, changes = _invent(stages)
    sigma, norm = stages.configuration.noise_multiplier, stages.configuration.max_grad_norm

    def play(changed: bool, noise: float = 1.0) -> torch.Tensor:
        world = World(stages, SHAPES, sigma * noise, dense=dense)
        released = []
        for _, clean, change in zip(world.steps(*_PROCESSES), sums, changes, strict=True):
            world.sums().copy_(clean + change if changed else clean)
            released.append(world.release())
        return torch.stack(released)

    # Where draws cannot be fixed there are no twins: then with next to no noise.
    without, with_it = twins(play) or (play(False, _NO_NOISE), play(True, _NO_NOISE))
    factor = abs(gain_of(without, sums.sum(1))) if dense else 1.0
    rounding = _ROUNDING * torch.linalg.vector_norm(without, dim=1) / factor
    found = torch.linalg.vector_norm(with_it - without, dim=1) / factor - rounding
    is_in = changes.flatten(1).any(1)
    again = torch.where(is_in, 0.0, found).nan_to_num(torch.inf) / norm
    problems = []
    if again.max() > _SLACK:
        step = int((again > _SLACK).nonzero()[0])
        since = int(is_in[:step].nonzero()[-1]) if is_in[:step].any() else step
        problems.append(
            f"what a sample added to the sum of step {since + 1} changes what is released in step "
            f"{step + 1}, in which it is not, by {float(again[step]):.2g} C (and in "
            f"{int((again > _SLACK).sum()) - 1} more steps): nothing that has no noise may be kept"
        )
    most = torch.where(is_in, found, 0.0).nan_to_num(torch.inf) / norm
    if dense and not problems and most.max() > 1 + _SLACK:
        step = int(most.argmax())
        rank = int(changes[step].any(1).nonzero()[0])
        problems.append(
            f"a change of C in the sum of rank {rank} changes what is released by "
            f"{float(most[step]):.3g} C: noise must depend on no data, and ranks count alike "
            f"(step {step + 1})"
        )
    return problems


def _masked_noise(stages: Stages) -> list[str]:
    """Compare noise with what a linear map of each coordinate makes of noised sums.

    If A_j is what T steps make of T sums at coordinate j, noised sums make noise of covariance
    sigma^2 A_j A_j^T of it.  Where that is smaller, sums were compressed and remembered clean.
    """
    configuration = stages.configuration
    sigma, ranks = configuration.noise_multiplier, configuration.world_size
    steps = sum(_FEW)
    rng = np.random.default_rng()
    parts = parts_of(SHAPES)
    numel = parts[-1][2]
    of_rank = torch.arange(numel) % ranks
    sizes = torch.from_numpy(rng.uniform(0.5, 2.0, (2, numel))).float()

    def play(at: int | None, size: torch.Tensor, noise: float) -> torch.Tensor:
        world = World(stages, SHAPES, sigma * noise)
        released = []
        for step, _ in enumerate(world.steps(*_FEW)):
            sums = world.sums()
            if step == at:
                sums[of_rank, torch.arange(numel)] = size * configuration.max_grad_norm
            released.append(world.release())
        return torch.stack(released)

    responses = torch.stack([play(t, sizes[0], _NO_NOISE) / sizes[0] for t in range(steps)])
    other = play(0, sizes[1], _NO_NOISE) / sizes[1]
    unit = configuration.max_grad_norm
    if not torch.allclose(other, responses[0], atol=1e-2 * unit):
        return []  # a sketch: coordinates are mixed
    # (numel, steps out, steps in)
    maps = (responses / unit).permute(2, 1, 0).double()
    values, vectors = torch.linalg.eigh(maps @ maps.transpose(1, 2))
    noise = play(None, sizes[0], 1.0).T.double() / claimed_deviation(stages, sigma)
    white = (vectors.transpose(1, 2) @ noise[:, :, None])[:, :, 0]
    seen = values > 1e-2
    energy = torch.where(seen, white.square() / values.clamp(min=1e-2), 0.0)
    groups = [("", 0, numel), *parts]
    allowed = chance("compressed: energy", len(groups))
    for name, start, end in groups:
        terms = int(seen[start:end].sum())
        found = float(energy[start:end].sum()) / max(1, terms)
        if terms and not found >= smallest_energy(terms, allowed):
            return [
                f"what is released after the compressor has {found:.2f} times the variance of "
                f"noised sums{f' in {name}' if name else ''}: error feedback must remember what "
                "has noise, and noise goes before the compressor"
            ]
    return []


def _without_noise(stages: Stages) -> list[str]:
    """Play the same data by two secrets, and other data: what is the same for a secret is clean."""
    configuration = stages.configuration
    rng = np.random.default_rng()
    steps = sum(_REPLAYED)
    numel = parts_of(SHAPES)[-1][2]
    deviation = configuration.noise_multiplier * configuration.max_grad_norm
    shape = (2, steps, configuration.world_size, numel)
    data = torch.from_numpy(rng.standard_normal(shape)).float() * deviation
    data[:, _BUSY:] = 0

    def play(sums: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        world = World(stages, SHAPES, configuration.noise_multiplier)
        seen = []
        for step, _ in enumerate(world.steps(*_REPLAYED)):
            world.sums().copy_(sums[step])
            seen.append((f"is released in step {step + 1}", world.release()))
            if configuration.placement in ("shares", "local"):
                for sent in world.sent:
                    for rank, message in enumerate(sent):
                        seen.append((f"rank {rank} sends in step {step + 1}", message))
            for rank, exchange in enumerate(world.exchanges):
                for tensor in _floats(exchange.state_dict()):
                    what = f"rank {rank} keeps in its exchange after step {step + 1}"
                    seen.append((what, tensor.flatten().clone()))
        return seen

    key = int.from_bytes(os.urandom(8), "little")
    plays = []
    for sums, secret in ((data[0], key), (data[0], key + 1), (data[1], key)):
        with fixed_secrets(secret), user_seed():
            plays.append(play(sums))
    for (what, one), (_, two), (_, three) in zip(*plays, strict=False):
        if not one.shape == two.shape == three.shape or one.dtype not in _EXACT:
            continue
        clean = (one == two) & (one != three) & (one != 0) & one.isfinite()
        if int(clean.sum()) >= max(_MOST_SAME, _MOST_SAME_SHARE * int((one != 0).sum())):
            return [
                f"{int(clean.sum())} of {clean.numel()} numbers that {what} are the same whatever "
                "the noise, and depend on the data: they have none"
            ]
    return []


def _floats(state: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in a state."""
    if isinstance(state, torch.Tensor):
        return [state] if state.is_floating_point() else []
    if isinstance(state, Mapping):
        return [tensor for value in state.values() for tensor in _floats(value)]
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in _floats(value)]
    return []
