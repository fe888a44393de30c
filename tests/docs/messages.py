"""The messages of errors and warnings, read from the source code."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

GAP = "…"
"""What stands for a value in a message."""


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
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                call = node.exc
                if _name(call.func) not in KINDS:
                    continue
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
                call = node.value
                if _name(call.func) != "PeerError":
                    continue
            elif isinstance(node, ast.Call) and _name(node.func) == "warn":
                call = node
            else:
                continue
            argument = call.args[0] if call.args else call
            message = _text(constants.get(ast.unparse(argument), argument))
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
