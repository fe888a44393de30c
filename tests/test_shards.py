"""Which owner has what, whatever is compressed together."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.compressors.base import Granularity
from comm_hooks.exchange.layout import Layout, Segment
from comm_hooks.exchange.shards import Shards

segments = st.lists(
    st.tuples(st.integers(0, 9), st.booleans()).filter(lambda s: s[0] or s[1]),
    min_size=1,
    max_size=6,
).map(lambda sizes: tuple(Segment(str(i), (n,), exempt) for i, (n, exempt) in enumerate(sizes)))


def numbered(segments: tuple[Segment, ...], granularity: Granularity) -> Layout:
    """Return a layout whose elements are all different, and none zero."""
    layout = Layout(segments, torch.device("cpu"), granularity)
    layout.work.copy_(torch.arange(1, layout.work.numel() + 1))
    return layout


@given(segments, st.integers(1, 5), st.sampled_from(["parameter", "bucket"]))
def test_what_is_cut_can_be_joined(
    segments: tuple[Segment, ...], owners: int, granularity: Granularity
) -> None:
    layout = numbered(segments, granularity)
    expected = layout.work.clone()
    shards = Shards(layout, owners)
    stacks = shards.cut()
    # There is nothing to cut of parameters without elements.
    everything = torch.cat([expected[:0], *(stack.flatten() for stack in stacks)])
    assert torch.equal(everything[everything != 0].sort().values, expected)
    layout.work.zero_()
    shards.join(stacks, layout)
    assert torch.equal(layout.work, expected)


@given(segments, st.integers(1, 5), st.sampled_from(["parameter", "bucket"]))
def test_an_owner_has_the_same_range_of_a_parameter_in_any_bucket(
    segments: tuple[Segment, ...], owners: int, granularity: Granularity
) -> None:
    layout = numbered(segments, granularity)
    shards = Shards(layout, owners)
    stacks = shards.cut()
    for owner in range(owners):
        for part, stack in zip(shards.owned.parts(), stacks, strict=True):
            part.matrix.copy_(stack[owner])
        owned = {
            name: row
            for rows in shards.owned.groups
            for name, row in zip(rows.names, rows.matrix, strict=True)
        }
        for segment, view in zip(segments, layout.views, strict=True):
            if not segment.exempt:
                width = -(-segment.numel // owners)
                expected = torch.zeros(width)
                own = view[owner * width : (owner + 1) * width]
                expected[: len(own)] = own
                assert torch.equal(owned[segment.name], expected)


def test_a_bucket_is_one_row_of_every_owner() -> None:
    layout = numbered(
        (Segment("a", (4, 5), False), Segment("norm", (3,), True), Segment("b", (7,), False)),
        "bucket",
    )
    assert [stack.shape for stack in Shards(layout, 2).cut()] == [(2, 1, 2), (2, 1, 10 + 4)]
