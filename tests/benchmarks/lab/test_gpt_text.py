"""The text without labels: cut into windows, some held out, the rest divided over clients."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.lab.tasks import Task


def test_the_text_is_cut_into_windows_that_predict_the_next_byte(
    small: Callable[..., Task], tmp_path: Path
) -> None:
    task = small("gpt_text", clients=1)
    text = (tmp_path / "gpt_text" / "rhyme.txt").read_bytes()
    client, held_out = task.clients[0], task.held_out
    for i, (inputs, targets) in enumerate(zip(client.inputs, client.targets, strict=True)):
        assert bytes(inputs.tolist()) == text[32 * i : 32 * i + 32]
        assert bytes(targets.tolist()) == text[32 * i + 1 : 32 * i + 33]
    # All but the last bytes, which fill no window, are used; none of them twice.
    count = (len(text) - 1) // 32
    used = torch.cat([client.indices, held_out.indices]).sort().values
    assert used.tolist() == list(range(count))
    assert 0.05 < len(held_out) / count < 0.2


def test_each_client_has_its_own_part_of_the_text(small: Callable[..., Task]) -> None:
    clients = small("gpt_text", clients=4).clients
    for before, after in pairwise(clients):
        assert before.indices.max() < after.indices.min()


def test_only_so_many_windows_are_judged(small: Callable[..., Task]) -> None:
    everything, some = small("gpt_text").held_out, small("gpt_text", eval_windows=7).held_out
    assert len(some) == 7 < len(everything)
    assert some.indices[0] == everything.indices[0]
    assert some.indices[-1] == everything.indices[-1]
    assert set(some.indices.tolist()) < set(everything.indices.tolist())
