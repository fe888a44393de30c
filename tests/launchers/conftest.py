import pytest

from tests.launchers.launch.commands import forget_launchers


@pytest.fixture(autouse=True)
def _no_launcher_around_us(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_launchers(monkeypatch)
