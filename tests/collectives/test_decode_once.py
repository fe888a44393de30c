"""A simulated world in which one rank decodes for all ends as one in which every rank does."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_hooks import ErrorFeedback, Exchange
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Compressor, CountSketch, Identity, PermK, Quantize, Sign, TopK
from comm_hooks.exchange.message import RoundContext
from comm_hooks.exchange.payload import PayloadFormat
from comm_hooks.exchange.settings import Collective
from comm_hooks.wire.stamp import Stamp

CASES: list[tuple[Compressor, Collective]] = [
    (TopK(density=1 / 8, value_bits=1), "all_gather"),
    (Sign(), "sharded"),
    (Quantize(bits=4, stochastic=True), "all_gather"),
    (PermK(), "all_gather"),
    (CountSketch(ratio=0.1), "all_reduce"),
    (Identity(), "all_reduce"),
]


def rounds(
    compressor: Compressor, collective: Collective, *, decode_once: bool, spoiled: int | None = None
) -> tuple[list[torch.Tensor], list[float]]:
    """Return what three rounds of 5 ranks leave in each tensor, and the norms of residuals."""
    world = Simulated(5, decode_once=decode_once)
    memories = [ErrorFeedback() if compressor.contractive else None for _ in world]
    exchanges = [
        Exchange(compressor, memory, collective, transport=t)
        for t, memory in zip(world, memories, strict=True)
    ]
    generator = torch.Generator().manual_seed(0)
    left: list[torch.Tensor] = []
    for step in range(3):
        vectors = [
            {"w": torch.randn(40, 103, generator=generator), "b": torch.ones(3)} for _ in world
        ]
        if step == spoiled:
            vectors[3]["w"][0, 0] = torch.inf
        world.run([e.round(v) for e, v in zip(exchanges, vectors, strict=True)])
        left += [tensor for of_rank in vectors for tensor in of_rank.values()]
    return left, [memory.norm() for memory in memories if memory]


@pytest.mark.parametrize("spoiled", [None, 1])
@pytest.mark.parametrize(("compressor", "collective"), CASES)
def test_decoding_once_changes_nothing(
    compressor: Compressor, collective: Collective, spoiled: int | None
) -> None:
    by_each, residuals = rounds(compressor, collective, decode_once=False, spoiled=spoiled)
    by_one, same = rounds(compressor, collective, decode_once=True, spoiled=spoiled)
    assert residuals == same
    for one, other in zip(by_each, by_one, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert any(tensor.isnan().any() for tensor in by_one) == (spoiled is not None)


def test_one_rank_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_sum, sums = PayloadFormat.decode_sum, []

    def noted(self: PayloadFormat, *arguments: Any, **options: Any) -> None:
        sums.append(self)
        decode_sum(self, *arguments, **options)

    monkeypatch.setattr(PayloadFormat, "decode_sum", noted)
    for decode_once, count in ((False, 5), (True, 1)):
        sums.clear()
        rounds(TopK(density=1 / 8), "all_gather", decode_once=decode_once)
        assert len(sums) == 3 * count


@pytest.mark.parametrize("keep_rest", [False, True])
@pytest.mark.parametrize("compressor", [TopK(density=1 / 8), Sign(), CountSketch(ratio=0.1)])
def test_payloads_made_together_are_those_made_one_by_one(
    compressor: Compressor, keep_rest: bool
) -> None:
    count, rows = 6, (2, 3)
    numels = (40, 7)
    form = PayloadFormat(
        [(compressor, n, numel) for n, numel in zip(rows, numels, strict=True)],
        ranks=[1] * count,
        place=1,
    )
    torch.manual_seed(0)
    stacks = [torch.randn(count, n, numel) for n, numel in zip(rows, numels, strict=True)]
    keys = [
        [[100 * m + 10 * p + r for r in range(n)] for m in range(count)] for p, n in enumerate(rows)
    ]
    of_all = [list(chain.from_iterable(of_part)) for of_part in keys]
    stamp, health = Stamp(7, 9), torch.tensor(0.0)
    residuals = [None] * len(rows) if keep_rest else None
    apart = [stack.clone() for stack in stacks]
    payloads = form.encode_all(stacks, of_all, health, stamp, residuals=residuals)
    for m in range(count):
        matrices = [stack[m] for stack in apart]
        message = SimpleNamespace(
            matrices=matrices,
            keys=[part[m] for part in keys],
            health=health,
            stamp=stamp,
            residuals=residuals,
        )
        assert torch.equal(form.encode(message), payloads[m])  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(apart, stacks, strict=True))
    assert float(form.check(payloads, RoundContext(stamp))) == 0
    form.decode_all(stacks, payloads, of_all)
    for m in range(count):
        form.decode([stack[m] for stack in apart], payloads[m], [part[m] for part in keys], 1)
    for one, other in zip(apart, stacks, strict=True):
        torch.testing.assert_close(one, other)
