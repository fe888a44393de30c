"""What this process has done in a group is not taken for what it does in one of the same name."""

from typing import Any

from comm_hooks.collectives.failure_detection import progress_of


class Group:
    group_name = "a name of this test's own"


def test_a_group_made_anew_under_the_same_name_is_of_another_generation() -> None:
    first: Any = Group()
    progress = progress_of(first)
    assert progress_of(first) is progress
    progress.fail(progress.begin())
    second: Any = Group()
    anew = progress_of(second)
    assert (progress.generation, anew.generation) == (0, 1)
    assert (anew.begun, anew.forgiven) == (0, -1)
