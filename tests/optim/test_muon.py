"""Muon, batched, is PyTorch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comm_hooks.optim.muon import Muon, orthogonalized

SIZES = st.integers(1, 24)


def make_matrices(shapes: list[tuple[int, int]], seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_it_takes_the_steps_of_pytorchs() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("needs PyTorch 2.9, the first with torch.optim.Muon")
    shapes = [(12, 5), (5, 12), (5, 12), (7, 7), (1, 9)]
    ours, theirs = make_matrices(shapes, 0), make_matrices(shapes, 0)
    optimizer = Muon(ours, lr=0.05, momentum=0.9, weight_decay=0.2)
    reference = torch.optim.Muon(
        theirs, lr=0.05, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(4):
        gradients = make_matrices(shapes, 1 + step)
        for own, other, gradient in zip(ours, theirs, gradients, strict=True):
            own.grad, other.grad = gradient.detach().clone(), gradient.detach().clone()
        before = [p.detach().clone() for p in theirs]
        optimizer.step()
        reference.step()
        for own, other, old in zip(ours, theirs, before, strict=True):
            # PyTorch's iteration is in bfloat16, of eight bits.
            assert (own - other).norm() < 0.03 * (step + 1) * (other - old).norm()


@settings(deadline=None)
@given(shapes=st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_matrices_are_orthogonalized_as_if_each_were_alone(
    shapes: list[tuple[int, int]], seed: int
) -> None:
    matrices = [p.detach() for p in make_matrices(shapes, seed)]
    together = orthogonalized(matrices)
    for matrix, result in zip(matrices, together, strict=True):
        [alone] = orthogonalized([matrix])
        torch.testing.assert_close(result, alone, rtol=1e-3, atol=1e-4)
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
        ours = (left.T @ result @ right.T).diag()
        assert (ours[singular > 0.02 * matrix.norm()] - 1).abs().max() < 0.45


def test_many_are_iterated_on_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [p.detach() for p in make_matrices([(4, 6)] * 5, 0)]
    expected = orthogonalized(matrices)
    monkeypatch.setattr("comm_hooks.optim.muon._TOGETHER", 50)
    for result, wanted in zip(orthogonalized(matrices), expected, strict=True):
        torch.testing.assert_close(result, wanted)


def test_nothing_becomes_of_a_gradient_of_nothing() -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = Muon([parameter], weight_decay=0.0)
    parameter.grad = torch.zeros(3, 4)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(3, 4))


def test_bfloat16_keeps_momenta_in_float32() -> None:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16))
    optimizer = Muon([parameter], lr=0.1)
    parameter.grad = torch.rand(3, 4).bfloat16()
    optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.float32
    assert not torch.equal(parameter.detach(), torch.ones(3, 4, dtype=torch.bfloat16))
