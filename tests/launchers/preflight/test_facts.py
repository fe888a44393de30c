"""What a node tells about itself."""

import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from comm_hooks.launchers.preflight.facts import (
    find_complaints,
    find_versions,
    source_digest,
)


def test_versions_name_what_trains() -> None:
    versions = find_versions()
    assert versions["torch"] == torch.__version__
    assert {"Python", "comm-hooks", "comm-hooks source", "deepspeed"} <= set(versions)


def test_a_digest_changes_with_any_source_and_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package/a.py").write_text("a = 1\n")
    # As comm_hooks/optim is in a checkout.
    (tmp_path / "package/linked").symlink_to(tmp_path / "real")
    (tmp_path / "real/b.py").write_text("b = 1\n")
    digests = [source_digest(tmp_path / "package")]
    (tmp_path / "package/notes.txt").write_text("x")
    assert source_digest(tmp_path / "package") == digests[0]
    (tmp_path / "real/b.py").write_text("b = 2\n")
    digests.append(source_digest(tmp_path / "package"))
    (tmp_path / "package/a.py").rename(tmp_path / "package/c.py")
    digests.append(source_digest(tmp_path / "package"))
    assert len(set(digests)) == 3


def test_a_machine_in_order_has_no_complaints(tmp_path: Path) -> None:
    assert find_complaints(tmp_path, {"GLOO_SOCKET_IFNAME": "lo"}) == []


def test_what_is_short_on_a_machine_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = find_complaints(tmp_path, {"GLOO_SOCKET_IFNAME": "lo,ib7"})
    assert line.startswith("GLOO_SOCKET_IFNAME is ib7, which is no interface of this machine")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 5_000_000))
        lines = find_complaints(tmp_path, {})
        assert f"only 5 MB are free in {tmp_path}" in lines
    with monkeypatch.context() as patch:
        patch.setattr(resource, "getrlimit", lambda what: (256, 4096))
        (line,) = find_complaints(tmp_path, {})
        assert "may open only 256 files" in line
