"""How the learning rate rises and falls: factors of it, by the share of the training that is over.

A schedule is named where somebody may choose it; ``warmed_up`` puts a linear warm-up before it.
"""

import math
from collections.abc import Callable, Mapping

Schedule = Callable[[float], float]
"""The factor of the learning rate, from the share of the steps that are over, in [0, 1)."""


def cosine(progress: float) -> float:
    """Fall from 1 to 1/1000 along half a cosine (Loshchilov & Hutter, ICLR 2017)."""
    return 1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * progress)) / 2


def constant(progress: float) -> float:
    """Stay at 1."""
    return 1.0


SCHEDULES: Mapping[str, Schedule] = {"cosine": cosine, "constant": constant}
"""By name."""


def warmed_up(schedule: Schedule, warmup: int, steps: int) -> Callable[[int], float]:
    """Return the factor as a function of the steps that are over.

    Args:
        schedule: what follows the warm-up.
        warmup: steps over which the factor rises linearly; the last of them has 1.
        steps: of the whole training.

    Example::

        >>> factor = warmed_up(cosine, warmup=2, steps=6)
        >>> [round(factor(done), 2) for done in range(6)]
        [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        return schedule((done - warmup) / max(1, steps - warmup))

    return factor
