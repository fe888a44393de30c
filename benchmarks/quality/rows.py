"""The rows of the page: which methods are trained in which settings."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from benchmarks.quality.runs import with_controls
from benchmarks.quality.settings import Setting

_TASKS = "python", "c", "images", "prose"
_SMALL = "python_small", "c_small", "images_small", "prose_small"
_UNTUNED = "perl", "perl_gru", "perl_experts"
"""Tasks that no constant of a method was chosen on."""
_SIGNS = "sign+local_variance_adam"
_HOOKS = "quantize:bits=2", "identity:bits=16", "powersgd", "count_sketch"
_WARNINGS = "topk:density=1/64", "sign"
_MUON = "low_communication:muon=true"
_ROUNDS = (
    "diloco:local_steps=30",
    "topk:density=1/64+sparse_loco:local_steps=30",
    "mu_lo_co:local_steps=30",
)


def _settings(tasks: Sequence[str], ranks: int, batch: int, tokens: float) -> list[Setting]:
    return [Setting(task, ranks, batch, tokens) for task in tasks]


ROWS: Sequence[tuple[Sequence[Setting], Sequence[str]]] = (
    (_settings([*_TASKS, *_UNTUNED], 4, 6, 2), ("low_communication",)),
    (_settings(["python", "perl"], 4, 6, 0.5), ("low_communication",)),
    (_settings(["images_resnet"], 4, 6, 2), ("low_communication",)),
    (_settings(_TASKS, 8, 6, 2), ("low_communication:bits=0.12", _SIGNS)),
    (_settings(["python", "images"], 4, 32, 2), ("low_communication",)),
    (_settings(_TASKS, 4, 6, 2), (_SIGNS, *_HOOKS)),
    (_settings(["prose"], 4, 6, 2), ("quantize:bits=4",)),
    (_settings(["python"], 4, 6, 2), _WARNINGS),
    (_settings(["python", "python_small"], 4, 6, 2), ("low_communication", _MUON)),
    (_settings(_TASKS, 2, 6, 2), ("low_communication:bits=0.06",)),
    (_settings(_SMALL, 4, 6, 20), ("low_communication",)),
    (_settings(["python_small"], 4, 6, 20), (_MUON, *_ROUNDS)),
    (_settings(["python"], 16, 6, 2), ("low_communication:bits=0.12",)),
)
"""Settings, and the methods that are trained in each of them in addition to the controls."""


def rows(pattern: str = "*") -> Iterator[tuple[Setting, list[str]]]:
    """Yield each setting of the page whose name matches, with its methods and their controls."""
    for settings, methods in ROWS:
        for setting in settings:
            if fnmatchcase(str(setting), pattern):
                yield setting, with_controls(methods)
