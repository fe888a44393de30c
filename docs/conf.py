"""The documentation site: Markdown pages, and a reference made from docstrings."""

import importlib.util
import re
from pydoc import locate
from typing import Any

from docutils.nodes import Element, reference
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import comm_hooks

project = "comm-hooks"
author = "The comm-hooks authors"
copyright = f"2026, {author}"
release = comm_hooks.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "_templates"]
html_theme = "furo"
html_title = f"comm-hooks {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autosummary_generate = True
autodoc_default_options = {
    "members": True,
    # Of our own bases: torch documents its classes itself.
    "inherited-members": "Optimizer,LRScheduler,Module,Protocol,Generic,object",
}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_mock_imports = [
    package
    for package in ("accelerate", "deepspeed", "lightning", "mpi4py", "transformers")
    if importlib.util.find_spec(package) is None
]
napoleon_numpy_docstring = False

# References into comm_hooks must resolve; other projects' pages are not looked up, so that the site
# builds without a network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!comm_hooks).*"),
    ("py:class", r"comm_hooks\.collectives\.requests\.Result"),  # a type variable
    ("py:class", r"comm_hooks\.memory\.feedback\.Feedback"),  # inside the library
    ("py:class", r"comm_hooks\.optim\.private\.accounting\.releases\.Releases"),  # inside, too
    ("py:class", r"comm_hooks\.frameworks\.fsdp\.units\.Unit"),  # made by compress_reduce_scatter
    ("py:class", r"comm_hooks\.registered_model\.RegisteredModel"),  # inside, too
    ("py:class", r"comm_hooks\.collectives\.gloo\.GlooRanks"),  # inside, too
    ("py:class", r"comm_hooks\.optim\.private\.gradients\.alone\.Alone"),  # inside, too
    ("py:class", r"comm_hooks\.optim\.private\.witness\.Witness"),  # inside, too
    ("py:class", r"comm_hooks\.frameworks\.ddp\.hook\.Privacy"),  # RankLevel
]


def _show_titles(app: Sphinx, name: str, source: list[str]) -> None:
    """Show the file name of a block, which Markdown keeps in its first line, as a caption."""
    source[0] = re.sub(
        r'^```(\w+) title="(?!run")(.+?)"$',
        r"```{code-block} \1\n:caption: \2\n",
        source[0],
        flags=re.MULTILINE,
    )


def _resolve(
    app: Sphinx, environment: BuildEnvironment, node: pending_xref, content: Element
) -> reference | None:
    """Find the page of an object that a docstring calls by another of its names.

    ``comm_hooks.exchange.Exchange`` is documented as ``comm_hooks.Exchange``.
    """
    wanted = node.get("reftarget", "")
    target = locate(wanted) if wanted.startswith("comm_hooks.") else None
    if target is None:
        return None
    python: Any = environment.get_domain("py")
    for name, entry in python.objects.items():
        if name.rpartition(".")[2] == wanted.rpartition(".")[2] and locate(name) is target:
            return make_refnode(
                app.builder, node["refdoc"], entry.docname, entry.node_id, content, name
            )
    return None


def setup(app: Sphinx) -> None:
    app.connect("source-read", _show_titles)
    app.connect("missing-reference", _resolve)
