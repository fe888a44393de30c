"""Links lead somewhere, and the API reference has every public name."""

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc import locate
from types import ModuleType

import pytest
import yaml

import comm_hooks
import comm_hooks.collectives
import comm_hooks.config
import comm_hooks.optim
import comm_hooks.optim.private
import comm_hooks.optim.private.accounting
import comm_hooks.optim.rounds
from tests.docs.pages import ROOT, Page, pages
from tests.docs.runner import missing_tools

PAGES = pages()


def anchors(page: Page) -> set[str]:
    """Return what ``#...`` may say on a page, as GitHub and the site make it from headings."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in page.headings():
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def broken_links(page: Page) -> Iterator[str]:
    """Yield the links of a page that lead nowhere in the repository; other sites are not asked."""
    for token in page.inline():
        target = token.attrs.get("href" if token.type == "link_open" else "src")
        if not isinstance(target, str) or re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.path.parent / path).resolve() if path else page.path
        if not file.exists() or (anchor and anchor not in anchors(Page(file))):
            yield target


def entries_of_toctrees(page: Page) -> Iterator[str]:
    """Yield the pages that a page puts into the navigation."""
    for token in page.tokens:
        if token.type == "fence" and token.info == "{toctree}":
            for line in token.content.splitlines():
                if line and not line.startswith(":"):
                    yield (page.path.parent / f"{line}.md").relative_to(ROOT).as_posix()


def public_names() -> Iterator[tuple[str, object]]:
    """Yield the full name of everything that users import, and the object."""
    modules: list[ModuleType] = [
        comm_hooks,
        comm_hooks.collectives,
        comm_hooks.optim,
        comm_hooks.optim.private,
        comm_hooks.optim.private.accounting,
        comm_hooks.optim.rounds,
    ]
    for module in modules:
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)
    for name, value in vars(comm_hooks.config).items():
        is_own = getattr(value, "__module__", "") == "comm_hooks.config"
        if not name.startswith("_") and (is_own or name.isupper()):
            yield f"comm_hooks.config.{name}", value


def names_imported_by(page: Page) -> Iterator[str]:
    """Yield the full names that the Python on a page imports from this library."""
    for block in page.blocks:
        if block.language != "python" or missing_tools(page):
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("comm_hooks"):
                yield from (f"{node.module}.{name.name}" for name in node.names)


def names_defined_in(module: str) -> list[str]:
    """Return the public names of a module, whose framework need not be installed."""
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    tree = ast.parse(Path(spec.origin).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, kinds) and n.name[0] != "_"]


def reference() -> str:
    return "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))


def documented(text: str) -> Iterator[str]:
    """Yield the full names in the tables and directives of the reference."""
    module = ""
    for line in text.splitlines():
        if directive := re.match(r"\.\. currentmodule:: (\S+)", line):
            module = directive[1]
        elif entry := re.fullmatch(r"(?:   |\.\. py:data:: )(\w+)", line):
            yield f"{module}.{entry[1]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Page) -> None:
    assert not list(broken_links(page))


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    site = {page.name for page in PAGES if page.name.startswith("docs/")} - {"docs/index.md"}
    listed = [entry for page in PAGES for entry in entries_of_toctrees(page)]
    assert sorted(listed) == sorted(site)


def test_the_reference_has_every_public_name() -> None:
    # Importing frameworks takes seconds, and none of these names is theirs.
    found = [locate(name) for name in documented(reference()) if ".frameworks." not in name]
    missing = [name for name, value in public_names() if not any(o is value for o in found)]
    assert not missing


def test_every_name_of_the_reference_exists() -> None:
    names = [n for n in documented(reference()) if ".frameworks." not in n and "opacus" not in n]
    assert len(names) > 100
    assert not [name for name in names if locate(name) is None]


def test_the_reference_has_what_the_pages_import() -> None:
    names = set(documented(reference()))
    names |= {name.rpartition(".")[0] for name in names}
    imported = {name for page in PAGES for name in names_imported_by(page)}
    assert "comm_hooks.register" in imported
    found = [locate(name) for name in names if ".frameworks" not in name]
    # Another name of an object that is documented is as good.
    missing = [n for n in sorted(imported - names) if not any(o is locate(n) for o in found)]
    assert not missing


def test_the_reference_has_all_of_the_frameworks() -> None:
    names = list(documented(reference()))
    missing = []
    for name in sorted({name.rpartition(".")[0] for name in names}):
        if name.startswith("comm_hooks.frameworks"):
            missing += [n for n in names_defined_in(name) if f"{name}.{n}" not in names]
    assert not missing


def test_the_citation_file_is_valid() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    assert citation["type"] in ("software", "dataset")
    for author in citation["authors"]:
        assert author.get("name") or author.get("family-names")
    assert citation["version"] == comm_hooks.__version__
    setup = (ROOT / "setup.cfg").read_text()
    assert f"\nlicense = {citation['license']}\n" in setup
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest
    assert newest[1] == citation["version"]


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# Some heading: `x`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](there.md) [b](there.md#some-heading-x) [c](#here) [d](https://example.org)\n"
        "[e](absent.md) [f](there.md#absent) [g](#absent) ![h](absent.png)\n"
    )
    assert list(broken_links(Page(page))) == [
        "absent.md",
        "there.md#absent",
        "#absent",
        "absent.png",
    ]
