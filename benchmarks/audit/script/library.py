"""The functions of the library that a script replaces by its own."""

import sys
from typing import Any


def functions() -> dict[str, Any]:
    """Return the functions, classes and methods of the library, and NumPy's generators, by name.

    Those of modules that are imported now.
    """
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name != "numpy.random" and name.partition(".")[0] != "comm_hooks":
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                methods = {m: f for m, f in vars(value).items() if callable(f)}
                found.update({f"{name}.{key}.{method}": f for method, f in methods.items()})
    return found


def replaced(before: dict[str, Any]) -> list[str]:
    """Return the names of functions that are others than :func:`functions` has returned before."""
    now = functions()
    return [name for name, function in before.items() if now.get(name) is not function]
