"""What imports what: only downwards, and never in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import comm_hooks

ROOT = Path(comm_hooks.__file__).parent.resolve().parent

# From the bottom up.  What a module lies in is the longest name that it begins with.
LAYERS = [
    ("errors", "requirements", "shards", "profiling", "transfers"),
    ("randomness",),
    ("kernels",),
    ("wire",),
    ("compressors",),
    ("memory",),
    ("config", "warnings"),
    ("collectives",),
    ("checkpoints",),
    ("exchange",),
    ("registered_model", "shared_model"),
    ("frameworks.ddp",),
    ("optim",),
    ("",),  # the package itself: what users import
    ("frameworks", "tracking"),
    ("launchers",),
]
HEIGHTS = {f"comm_hooks.{n}".rstrip("."): h for h, names in enumerate(LAYERS) for n in names}


def modules() -> dict[str, Path]:
    """Return the files of the package by the names under which they are imported."""
    folders = {"comm_hooks": ROOT / "comm_hooks"}
    folders.update({f"comm_hooks.{n}": ROOT / n for n in ("optim", "launchers")})
    found = {}
    for prefix, folder in folders.items():
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder).with_suffix("").parts
            if prefix == "comm_hooks" and parts[0] in ("optim", "launchers"):
                continue
            found[".".join([prefix, *(p for p in parts if p != "__init__")])] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of the package that a file imports, at the top or later."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module


def height(module: str) -> int:
    """Return the layer that a module is in."""
    names = [n for n in HEIGHTS if module == n or module.startswith(n + ".")]
    return HEIGHTS[max(names, key=len)]


def test_imports_go_downwards() -> None:
    known = modules()
    upward = []
    for module, file in known.items():
        upward += [
            f"{module} imports {imported}"
            for imported in imports(file, known)
            if height(imported) > height(module)
        ]
    assert not upward


def test_no_imports_go_in_a_circle() -> None:
    known = modules()
    below = {module: set(imports(file, known)) for module, file in known.items()}
    while free := {module for module, needed in below.items() if not needed & below.keys()}:
        below = {module: needed for module, needed in below.items() if module not in free}
    assert not below


def test_nothing_shipped_imports_the_laboratory() -> None:
    roots = {
        node.module.split(".")[0] if isinstance(node, ast.ImportFrom) and node.module else ""
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
    }
    named = {
        alias.name.split(".")[0]
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not {"benchmarks", "tests"} & (roots | named)
