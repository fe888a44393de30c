"""The ledger: nothing that was released is ever missing from it, whatever happens."""

import copy
import errno
import json
import os
import pickle
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant
from comm_hooks.optim.private.accounting.ledger import Ledger
from comm_hooks.optim.private.errors import PrivacyError

MECHANISMS = [(1.0, 0.01), (0.7, 0.01), (4096 / 45000, 1.0)]
histories = st.lists(
    st.builds(
        lambda mechanism, steps: GaussianEvent(*mechanism, steps=steps),
        st.sampled_from(MECHANISMS),
        st.integers(1, 200),
    ),
    max_size=8,
)
STEP, OTHER = GaussianEvent(1.0, 0.01), GaussianEvent(0.7, 0.01)
PLACED = GaussianEvent(
    1.0, 0.01, placement="shares", checkpoint_multiplier=1.0, rank_multiplier=0.5
)


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture(autouse=True)
def _disk_without_waiting(monkeypatch):
    """Nothing here pulls the plug; that fsync is called, and when, has tests of its own."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "privacy.jsonl"


def steps_of(events):
    return sum(event.steps for event in events)


@settings(max_examples=50, deadline=None)
@given(history=histories, sessions=st.integers(1, 3))
def test_what_was_recorded_comes_back(tmp_path_factory, history, sessions):
    path = tmp_path_factory.mktemp("ledger") / "privacy.jsonl"
    in_memory = Ledger(None)
    before = b""
    for session in range(sessions):
        with Ledger(path) as ledger:
            assert ledger.events() == in_memory.events()
            for event in history[session::sessions]:
                ledger.record(event)
                in_memory.record(event)
                # Append-only, and complete before anything is released.
                assert path.read_bytes().startswith(before)
                before = path.read_bytes()
                assert before.endswith(b"\n")
            assert ledger.events() == in_memory.events()


def test_the_file(path):
    with Ledger(path) as ledger:
        ledger.record(STEP)
        ledger.record(GaussianEvent(1.0, 0.01, 2))
        ledger.record(PLACED)
        run = ledger.run
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    seals = [line.pop("seal") for line in lines if isinstance(line, dict)]
    assert lines[0] == {"ledger": 4}
    known = {"placement": None, "checkpoint_multiplier": None, "rank_multiplier": None}
    assert lines[1] == {"noise_multiplier": 1.0, "sample_rate": 0.01, **known, "run": run}
    steps = [line.split() for line in lines if isinstance(line, str)]
    assert [word for word, _ in steps] == ["step"] * 4
    placed = {"placement": "shares", "checkpoint_multiplier": 1.0, "rank_multiplier": 0.5}
    assert lines[5] == {"noise_multiplier": 1.0, "sample_rate": 0.01, **placed, "run": run}
    assert len({*seals, *(seal for _, seal in steps)}) == len(lines) == 7
    with Ledger(path) as ledger:
        assert ledger.run != run, "of this process"
        assert ledger.events() == [GaussianEvent(1.0, 0.01, 3), PLACED]


def test_a_crash_at_every_byte(path):
    """Whole lines count, and a torn line counts as a step, once for all."""
    with Ledger(path) as ledger:
        for event in (GaussianEvent(1.0, 0.01, 2), OTHER, PLACED):
            ledger.record(event)
    content = path.read_bytes()
    header = content.index(b"\n") + 1
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole, torn = content[:cut].rpartition(b"\n")[::2]
        # Before the first mechanism is known, record() cannot have returned.
        was_torn = bool(torn) and whole.count(b"\n") >= 1
        counted = whole.count(b'"step ') + was_torn
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with Ledger(path) as ledger:
                events = ledger.events()
        assert steps_of(events) == counted
        assert len(caught) == (bool(torn) and cut >= header), content[:cut]
        if caught:
            assert "its last line was torn by a crash" in str(caught[0].message)
            assert caught[0].filename == __file__
        # Now the file is whole, and goes on.
        with Ledger(path) as ledger:
            assert ledger.events() == events
            ledger.record(STEP)
            ledger.record(OTHER)
            expected = ledger.events()
        assert steps_of(expected) == steps_of([*events, STEP, OTHER])
        with Ledger(path) as ledger:
            assert ledger.events() == expected


def test_every_byte_that_is_changed_is_noticed(path):
    with Ledger(path) as ledger:
        for event in (STEP, PLACED):
            ledger.record(event)
    content = path.read_bytes()
    for place in range(len(content) - 1):  # without the last line's end that line is a torn one
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"is not|its format is"):
            Ledger(path)
    lines = content.splitlines(keepends=True)
    for number in range(1, len(lines) - 1):
        path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))
        with pytest.raises(ValueError, match=f"line {number + 1} is not as it was written"):
            Ledger(path)


@pytest.mark.parametrize("end", [b" ", b"\r", b""])
def test_a_file_that_lost_its_line_ends_is_left_alone(path, end):
    with Ledger(path) as ledger:
        for _ in range(3):
            ledger.record(GaussianEvent(1.0, 0.1))
    with open(path, "rb") as file:
        content = file.read().replace(b"\n", end)
    with open(path, "wb") as file:
        file.write(content)
    with pytest.raises(ValueError, match="the file exists and is not a ledger"):
        Ledger(path)
    with open(path, "rb") as file:
        assert file.read() == content


def shortened(path):
    os.truncate(path, path.read_bytes().rindex(b"\n", 0, -1) + 1)


def replaced(path):
    copied = path.with_suffix(".copy")
    copied.write_bytes(path.read_bytes())
    copied.rename(path)


def longer(path):
    with open(path, "ab") as file:
        file.write(b"1\n")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (os.unlink, "deleted"),
        (replaced, "replaced"),
        (shortened, "changed"),
        (longer, "changed"),
    ],
)
def test_what_happens_to_the_file_while_it_is_open(path, change, problem):
    with Ledger(path) as ledger:
        ledger.record(STEP)
        ledger.record(STEP)
        change(path)
        with pytest.raises(PrivacyError, match=rf"privacy.jsonl was {problem}.* while it was open"):
            ledger.record(STEP)
        assert steps_of(ledger.events()) == 2, "which was not released"


def test_a_ledger_of_a_relative_path_after_a_change_of_folder(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with Ledger(path.name) as ledger:
        monkeypatch.chdir("/")
        ledger.record(STEP)


@pytest.mark.parametrize("torn", [b"\0\0", b"9" * 5_000])
def test_a_crash_that_left_something_else(path, torn):
    with Ledger(path) as ledger:
        ledger.record(STEP)
    path.write_bytes(path.read_bytes() + torn)
    with pytest.warns(UserWarning, match="counts as released"), Ledger(path) as ledger:
        assert steps_of(ledger.events()) == 2


def test_steps_after_a_mechanism_that_took_none(path):
    """A crash between a mechanism's line and its first step must not make later steps its own."""
    with Ledger(path) as ledger:
        ledger.record(STEP)
    with Ledger(path) as ledger:
        ledger.record(OTHER)
    shortened(path)
    with Ledger(path) as ledger:
        ledger.record(STEP)
    with Ledger(path) as ledger:
        assert ledger.events() == [GaussianEvent(1.0, 0.01, 2)]


@pytest.mark.parametrize(
    "line",
    [
        *("", "nonsense", "1", '"step 0123456789abcdef"', "null", "[1]", "{}", "\ufeff1"),
        '{"noise_multiplier": 0.0, "sample_rate": 0.01}',
        *("[" * 20_000, "9" * 5_000),  # too deep for the parser, or more steps than there can be
    ],
    ids=lambda line: line[:20],
)
def test_lines_that_cannot_be_read(path, line):
    with Ledger(path) as ledger:
        ledger.record(STEP)
    damaged = f"{path.read_text()}{line}\n1\n"
    path.write_text(damaged)
    with pytest.raises(
        ValueError, match=r"privacy.jsonl: line 4 is not as it was written.*Restore"
    ) as caught:
        Ledger(path)
    assert path.read_text() == damaged
    # Nor does it stay locked, though the error, with its traceback, is still there.
    assert caught.tb
    path.write_text("")
    Ledger(path).close()
    path.write_text(path.read_text() + "1\n")  # before any mechanism
    with pytest.raises(ValueError, match="line 2 is not as it was written"):
        Ledger(path)


NO_LEDGER = ["my notes", "my notes\n1\n", "[]\n", '{"a": 1}\n', '{"x', "[" * 20_000 + "\n"]


@pytest.mark.parametrize("content", [*NO_LEDGER, '{"ledger": 2, "run": "a"}\n'])
def test_other_files_are_left_alone(path, content):
    path.write_text(content)
    message = "the file exists and is not a ledger" if content in NO_LEDGER else "its format is 2; "
    with pytest.raises(ValueError, match=message):
        Ledger(path)
    assert path.read_text() == content


def test_one_process_at_a_time(path):
    first = Ledger(path)
    first.record(STEP)
    with pytest.raises(ValueError, match="is open elsewhere: one process writes a ledger"):
        Ledger(path)
    # A process of its own, without the seconds that importing us takes.
    locking = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-S", "-c", locking, str(path)]
    assert "BlockingIOError" in subprocess.run(command, capture_output=True, text=True).stderr
    first.record(STEP)
    first.close()
    assert subprocess.run(command).returncode == 0
    with Ledger(path) as ledger:
        assert steps_of(ledger.events()) == 2


RELEASING = """
import sys
from comm_hooks.optim.private.accounting import GaussianEvent
from comm_hooks.optim.private.accounting.ledger import Ledger
ledger = Ledger(sys.argv[1])
for step in range(10**6):
    ledger.record(GaussianEvent(1.0 + step // 50, 0.01))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed(path):
    command = [sys.executable, "-c", RELEASING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == 200:
                break
        process.kill()
        released = [200, *map(int, process.stdout.read().split())][-1] + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a torn line, if it was killed while writing
        ledger = Ledger(path)
    assert released <= steps_of(ledger.events()) <= released + 1
    ledger.close()


def test_a_line_is_on_the_disk_before_record_returns(path, monkeypatch):
    ledger = Ledger(path)
    calls = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (calls.append(data), write(fd, data))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    ledger.record(STEP)
    ledger.record(STEP)
    assert calls[1::2] == ["fsync", "fsync"]
    assert calls[2].startswith(b'"step ')
    ledger.close()


def test_a_new_files_name_is_on_the_disk(path, monkeypatch):
    synced = []

    def fsync(fd):
        synced.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    Ledger(path).close()
    assert synced == [path.stat().st_ino, path.parent.stat().st_ino]


def test_writes_that_take_only_a_part(path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    with Ledger(path) as ledger:
        ledger.record(STEP)
        ledger.record(GaussianEvent(0.7, 0.01, 12))
    monkeypatch.undo()
    with Ledger(path) as ledger:
        assert ledger.events() == [STEP, GaussianEvent(0.7, 0.01, 12)]


def test_a_full_disk(path, monkeypatch):
    ledger = Ledger(path)
    ledger.record(STEP)

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.record(STEP)
    monkeypatch.undo()
    # It was not recorded, so it must not be released: nothing is counted, and nothing follows.
    assert ledger.events() == [STEP]
    with pytest.raises(ValueError, match="is closed: nothing can be recorded"):
        ledger.record(STEP)
    with Ledger(path) as ledger:
        assert ledger.events() == [STEP]


def test_warnings_that_are_errors(path):
    """What is to be counted is written before anybody is told."""
    with Ledger(path) as ledger:
        ledger.record(STEP)
    path.write_bytes(path.read_bytes() + b"1")
    with pytest.raises(UserWarning, match="torn"):
        Ledger(path)
    with Ledger(path) as ledger:
        assert steps_of(ledger.events()) == 2
        (run,) = {event.run for event in ledger.history()}
        with pytest.raises(UserWarning, match="lacks 3 steps"):
            ledger.reconcile([GaussianEvent(1.0, 0.01, 5, run=run)])
        assert steps_of(ledger.events()) == 5


def test_a_ledger_is_not_copied():
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a Ledger cannot be saved or copied.*Save events\(\)"):
            copying(Ledger(None))


def of_run(events, run):
    return [replace(event, run=run) for event in events]


def reconciled(ledger, checkpoint):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        events = ledger.reconcile(checkpoint)
    assert all(warning.filename == __file__ for warning in caught)
    return events, [str(warning.message) for warning in caught]


def test_a_run_that_went_back_to_a_checkpoint(path):
    agreeing = Ledger(None, run="a")
    for event in (STEP, OTHER, STEP):
        agreeing.record(event)
    # The order in which steps were taken costs nothing.
    checkpoint = of_run([GaussianEvent(1.0, 0.01, 2), OTHER], "a")
    assert agreeing.reconcile(checkpoint) == [STEP, OTHER, STEP]
    with Ledger(path, run="a") as ledger:
        ledger.record(GaussianEvent(1.0, 0.01, 140))
        events, (message,) = reconciled(ledger, of_run([GaussianEvent(1.0, 0.01, 100)], "a"))
    assert events == [GaussianEvent(1.0, 0.01, 140)]
    assert "counts 40 steps that the checkpoint does not: they were released after" in message


@settings(max_examples=60, deadline=None)
@given(histories, histories, st.sampled_from([1e-9, 1e-5, 1e-2]), st.booleans())
def test_reconciling_never_counts_less(recorded, saved, delta, is_of_this_run):
    ledger = Ledger(None, run="a")
    for event in recorded:
        ledger.record(event)
    events, messages = reconciled(ledger, of_run(saved, "a" if is_of_this_run else "b"))
    assert events == ledger.events()
    for mechanism in MECHANISMS:
        ours, theirs, result = (
            steps_of(event for event in history if event.mechanism == mechanism)
            for history in (recorded, saved, events)
        )
        assert result == (max(ours, theirs) if is_of_this_run else ours + theirs)
    for history in (recorded, saved):
        if history:
            epsilon = RDPAccountant().epsilon(history, delta)
            assert RDPAccountant().epsilon(events, delta) >= epsilon * (1 - 1e-12)
    counts = [
        {m: steps_of(e for e in history if e.mechanism == m) for m in MECHANISMS}
        for history in (recorded, saved)
    ]
    assert bool(messages) == (counts[0] != counts[1] if is_of_this_run else bool(recorded + saved))
    again, _ = reconciled(ledger, ledger.history())
    assert again == events


def test_each_run_counts_by_itself(path):
    """Whatever is restored, forked or continued twice: the sum of the most that each run counts."""
    first = Ledger(None, run="a")
    first.record(GaussianEvent(1.0, 0.01, 100))
    at_100 = first.history()
    first.record(GaussianEvent(1.0, 0.01, 50))
    with Ledger(path) as ledger:
        reconciled(ledger, at_100)
        ledger.record(GaussianEvent(1.0, 0.01, 80))
        backup, at_180 = path.read_bytes(), ledger.history()
        ledger.record(GaussianEvent(1.0, 0.01, 40))  # in the checkpoint, and not in the backup
        checkpoint = ledger.history()
    path.write_bytes(backup)
    with Ledger(path) as ledger:
        assert ledger.history() == at_180
        ledger.record(GaussianEvent(1.0, 0.01, 20))
        assert steps_of(reconciled(ledger, checkpoint)[0]) == 100 + 80 + 40 + 20
        assert steps_of(reconciled(ledger, first.history())[0]) == 150 + 80 + 40 + 20
        events, messages = reconciled(ledger, ledger.history())
        assert not messages
    with Ledger(path) as ledger:
        assert ledger.events() == events
