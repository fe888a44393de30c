"""``comm-hooks advise``: predict the step time of each method on a link, and recommend one.

A prediction (:mod:`.cost_model`) is made of the payloads and the arithmetic of a method
(:mod:`.methods`) and the speed of the links (:mod:`.links`).  A recommendation (:mod:`.recommend`)
also needs the method's share of all-reduce's gain in measured trainings (:mod:`.quality`).
"""

from typing import Any

__all__ = ["Step", "measure_step"]


def __getattr__(name: str) -> Any:
    """Import a name on demand: ``comm-hooks advise --help`` needs no PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from comm_hooks.launchers.advise import step

    return getattr(step, name)
