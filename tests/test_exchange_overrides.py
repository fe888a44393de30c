"""What a single round may do differently: another compressor, another memory; and bfloat16 rows."""

import pytest
import torch

from comm_hooks import CountSketch, Differences, ErrorFeedback, Exchange, Identity, Sign, TopK
from comm_hooks.frameworks.ddp.hook import CompressionState
from comm_hooks.wire.gathered_header import HEADER_NBYTES
from tests.test_exchange import SHAPES, World, mean


@pytest.mark.parametrize("collective", ["all_gather", "sharded"])
def test_nothing_is_lost_when_compressors_change_from_round_to_round(collective: str) -> None:
    world = World(3, TopK(density=0.02), collective=collective)
    true = {n: torch.zeros(SHAPES[n]) for n in "ac"}
    sent = {n: torch.zeros(SHAPES[n]) for n in "ac"}
    for compress in (TopK(density=0.2), True, Sign(), False, TopK(density=0.5), True):
        gradients = world.gradients("ac")
        results = world.average(gradients, compress=compress)
        for name in "ac":
            true[name] += mean(gradients, name)
            sent[name] += results[0][name]
            torch.testing.assert_close(
                true[name], sent[name] + world.residual(name), atol=2e-5, rtol=0
            )


def test_a_compressor_for_one_round_decides_its_bytes() -> None:
    world = World(2, TopK(density=1 / 64))
    moved = []
    for compress in (TopK(density=1 / 4), True, TopK(density=1 / 4)):
        before = world.exchanges[0].stats()["bytes_sent"]
        world.average(world.gradients("a"), compress=compress)
        moved.append(world.exchanges[0].stats()["bytes_sent"] - before)
    assert moved[0] == moved[2] > 8 * moved[1]


def test_a_compressor_that_the_memory_cannot_stand_is_refused_for_a_round_too() -> None:
    world = World(2, TopK())
    with pytest.raises(ValueError, match="not contractive"):
        world.average(world.gradients("a"), compress=CountSketch())


@pytest.mark.filterwarnings("ignore:world size is 1")
def test_another_memory_takes_the_place_of_the_own_one_for_a_round() -> None:
    world = World(1, TopK(density=0.1))
    exchange = world.exchanges[0]
    assert exchange.memory
    others = [exchange.memory.fresh(), exchange.memory.fresh()]
    gradient = torch.randn(SHAPES["a"])
    results = []
    for memory in (None, others[0], others[1], others[0]):
        tensors = {"a": gradient.clone()}
        world.simulated.run([exchange.round(tensors, memory=memory)])
        results.append(tensors["a"])
    # The first round of every memory sends the same; the second of others[0] what was left.
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
    assert not torch.equal(results[1], results[3])
    for memory, rounds in ((exchange.memory, 1), (others[0], 2), (others[1], 1)):
        left = memory.state_dict()["a"].view(SHAPES["a"])
        sent = results[0] if rounds == 1 else results[1] + results[3]
        torch.testing.assert_close(rounds * gradient, sent + left, atol=1e-5, rtol=0)


def test_exempt_parameters_in_bfloat16_take_half_the_bytes_and_agree() -> None:
    moved = []
    for bits in (32, 16):
        world = World(3, TopK(density=0.1), collective="all_gather", exempt_bits=bits)
        gradients = world.gradients("be")
        results = world.average(gradients)
        for name in "be":
            assert all(torch.equal(r[name], results[0][name]) for r in results)
            torch.testing.assert_close(
                results[0][name], mean(gradients, name), rtol=0, atol=1e-6 if bits == 32 else 0.02
            )
        error = (results[0]["b"] - mean(gradients, "b")).abs().max()
        assert (error < 1e-6) == (bits == 32)
        moved.append(world.exchanges[0].stats()["bytes_sent"])
    elements = 33 + 9
    assert moved[0] == 2 * (HEADER_NBYTES + 4 * elements)
    assert moved[1] == 2 * (HEADER_NBYTES + 2 * elements + 4), "a multiple of 8"


def test_with_one_dimension_enough_small_vectors_are_compressed_too_and_nothing_is_lost() -> None:
    world = World(3, TopK(density=0.1), collective="all_gather", min_ndim=1, min_numel=33)
    gradients = world.gradients("be")
    results = world.average(gradients)
    residuals = [e.memory.state_dict() for e in world.exchanges if e.memory]
    assert all(set(kept) == {"b"} for kept in residuals), "only what is large enough"
    sent = mean(gradients, "b") - sum(kept["b"] for kept in residuals) / 3
    torch.testing.assert_close(results[0]["b"], sent)
    assert not torch.allclose(results[0]["b"], mean(gradients, "b"))


def test_a_warm_up_step_is_exact_whatever_the_exempt_bits() -> None:
    world = World(2, TopK(), exempt_bits=16)
    gradients = world.gradients("abe")
    results = world.average(gradients, compress=False)
    for name in "abe":
        torch.testing.assert_close(results[0][name], mean(gradients, name))


def test_bfloat16_cannot_be_summed_on_the_wire() -> None:
    with pytest.raises(ValueError, match="exempt parameters in bfloat16 cannot be summed"):
        Exchange(CountSketch(), collective="all_reduce", exempt_bits=16)
    with pytest.raises(ValueError, match="bits must be one of 16, 32"):
        Exchange(CountSketch(), exempt_bits=8)
    assert not Identity(bits=16).linear


def test_changes_are_refused_where_an_optimizer_would_take_them_for_gradients() -> None:
    with pytest.raises(ValueError, match="sends changes"):
        CompressionState(Sign(), Differences())
    assert CompressionState(Sign(), ErrorFeedback()).exchange.memory
