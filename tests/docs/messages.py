"""The messages of errors and warnings, read from the source code."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

GAP = "…"
"""What stands for a value in a message."""


# Where requirements are worded: what is required stands in the calls, as the third argument.
_SHARED = ("requirements.py", "_refuse")

WARNING = ("warn", "warn_program")
KINDS = ("ValueError", "ConfigMismatchError", "PayloadError", "PeerError", "PrivacyError")


def messages(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Yield where each message of an error or a warning stands, and the message.

    Values in it are replaced by :data:`GAP`, runs of white space by a space.  Errors for those who
    program with the library's internals (``TypeError``, ``RuntimeError``, ``AssertionError``) are
    left out.
    """
    for file in files:
        tree = ast.parse(file.read_text())
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        shared = {
            id(inner)
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and (file.name, node.name) == _SHARED
            for inner in ast.walk(node)
        }
        for node in tree.body:
            # A table of what is refused: a test, the message, what to do instead.
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_REFUSED":
                assert isinstance(node.value, ast.Tuple)
                for row in node.value.elts:
                    yield f"{file.name}:{row.lineno}", _text(row.elts[1])  # type: ignore[attr-defined]
        for node in ast.walk(tree):
            if id(node) in shared:
                continue
            if isinstance(node, ast.Call) and shared and _name(node.func) == _SHARED[1]:
                yield f"{file.name}:{node.lineno}", f"{_text(node.args[2])}, got {GAP}"
                continue
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
                if _name(call.func) not in KINDS:
                    continue
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                call = node.value
                if _name(call.func) != "PeerError":
                    continue
            elif isinstance(node, ast.Call) and _name(node.func) in WARNING:
                call = node
            else:
                continue
            argument = call.args[0] if call.args else call
            argument = constants.get(ast.unparse(argument), argument)
            # One of several.
            is_choice = isinstance(argument, ast.Subscript) and isinstance(
                argument.value, ast.Tuple
            )
            for choice in argument.value.elts if is_choice else [argument]:
                message = _text(choice)
                if re.search(r"\w", message):
                    yield f"{file.name}:{call.lineno}", message


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        text = str(node.value)
    elif isinstance(node, ast.JoinedStr):
        text = "".join(_text(part) for part in node.values)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        text = _text(node.left) + _text(node.right)
    else:
        text = GAP
    return re.sub(rf"{GAP}+", GAP, re.sub(r"\s+", " ", text))
