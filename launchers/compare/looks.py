"""What each method looks like: the same in all plots and charts."""

from collections.abc import Iterable
from dataclasses import dataclass

from comm_hooks.launchers.compare.groups import BASELINE, CONTROL

COLOURS = 6
"""As many as people can tell apart; the methods after these have dashed lines, then dotted ones."""

DASHES = 3


@dataclass(frozen=True)
class Look:
    """A colour and a way to dash a line.

    ``colour`` is ``"baseline"`` or ``"control"`` for the two that the others are measured by, else
    the number of one of :data:`COLOURS`; ``dash`` is 0 (solid), 1 (dashed) or 2 (dotted).
    """

    colour: str
    dash: int


def assign_looks(methods: Iterable[str]) -> list[Look]:
    """Give each method a look, in order; methods named twice get two.

    Example::

        >>> from comm_hooks.launchers.compare.looks import assign_looks
        >>> [look.colour for look in assign_looks(["all_reduce", "topk", "none", "sign"])]
        ['baseline', '0', 'control', '1']
    """
    looks: list[Look] = []
    for method in methods:
        if method in (BASELINE, CONTROL):
            colour = "baseline" if method == BASELINE else "control"
            lap = sum(look.colour == colour for look in looks) + (method == CONTROL)
        else:
            lap, number = divmod(sum(look.colour.isdigit() for look in looks), COLOURS)
            colour = str(number)
        looks.append(Look(colour, lap % DASHES))
    return looks
