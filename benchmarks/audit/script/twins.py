"""Two runs that differ in one sample: is all else the same, and that by no more than C?"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.audit.script.noise import drawn_of
from benchmarks.audit.script.run import Run

# By how much a clipped gradient may exceed C: float32's roundings, and those of a sum per sample.
_SLACK = 1e-4
_SUM_SLACK = 1e-6
# Where a batch has one row less, kernels add up in another order, and a ReLU may turn over.
_OTHER_SHAPE_SLACK = 1e-2


@dataclass(frozen=True)
class Twins:
    """What one sample has changed.

    Attributes:
        planted: which, and what it was.
        drawn: in how many steps it was in the batch.
        largest: change of a clipped sum, over C; None where that was not compared.
        problems: what the sample shows by, in words.
    """

    planted: str
    drawn: int
    largest: float | None
    problems: list[str]


def compare(base: Run, run: Run, reference: Run, unit: str) -> Twins:
    """Compare a run with its neighbour's.

    1. parameters, buffers, settings of optimizers and of the mechanism are equal, bit by bit,
       before and after every step, of any optimizer: both went on with the same releases
    2. sums of steps in which the sample was not drawn are equal, bit by bit
    3. those of the others differ by at most C (1 + 10^-4), over all ranks together

    Args:
        base, run: one has the sample, or has another one in its place.
        reference: whose releases both have followed, which says who was drawn.
        unit: what is planted, a word.
    """
    planted = run.variant.plant or base.variant.plant
    assert planted is not None
    kind = run.variant.plant.kind if run.variant.plant else "as it is"
    drawn = [planted.index in indices for indices in drawn_of(reference)]
    problems: list[str] = []
    largest: float | None = None
    pairs = list(zip(base.ranks, run.ranks, strict=True))
    comparable = min(len(r["releases"]) for r in (*base.ranks, *run.ranks))
    for rank, (one, two) in enumerate(pairs):
        found = _first_difference(one, two, f"{unit} {planted.index}")
        if found:
            comparable = min(comparable, found.releases)
            if found.message not in problems:
                of_rank = f" (rank {rank})" if len(pairs) > 1 and not problems else ""
                problems.append(found.message + of_rank)
    same_shape = _has_as_many_rows(base) == _has_as_many_rows(run)
    for step in range(comparable):
        releases = [(a["releases"][step], b["releases"][step]) for a, b in pairs]
        where = releases[0][1]["where"]
        bound = releases[0][1]["settings"][1]
        differences = [b["sums"].double() - a["sums"].double() for a, b in releases]
        if step >= len(drawn) or not drawn[step]:
            if any(bool((d != 0).any()) for d in differences):
                size = _norm(differences) / bound
                problems.append(
                    f"{where}: in step {step + 1} the clipped sum depends on {unit} "
                    f"{planted.index} ({kind}), which was not drawn for it: by {size:.3g} C"
                )
                break
            continue
        if not same_shape and _draws_for_each_row(base, run, step):
            continue
        if base.variant.plant and base.variant.plant.kind == "not finite":
            # Where it still counts, what is there instead of it may differ by 2 C.
            if not any(_left_out(rank, step) for rank in base.ranks):
                continue
        size = _norm(differences) / bound
        largest = max(largest or 0.0, size)
        rows = len(drawn_of(reference)[step])
        slack = _SLACK + rows * _SUM_SLACK + (0.0 if same_shape else _OTHER_SHAPE_SLACK)
        if not size <= 1 + slack:
            problems.append(
                f"{where}: {unit} {planted.index} ({kind}) changes the clipped sum of step "
                f"{step + 1} by {size:.4g} C, where the noise is for C"
            )
            break
    return Twins(f"{planted.index}, {kind}", sum(drawn), largest, problems[:3])


def are_alike(one: Run, other: Run) -> str | None:
    """Return where two runs with nothing changed between them differ, or None."""
    for a, b in zip(one.ranks, other.ranks, strict=True):
        if found := _first_difference(a, b, "nothing"):
            return found.where
        for x, y in zip(a["releases"], b["releases"], strict=False):
            if not torch.equal(x["sums"], y["sums"]):
                return f"{x['where']}: clipped sums"
    return None


def _has_as_many_rows(run: Run) -> bool:
    return run.variant.plant is None or run.variant.plant.kind != "absent"


def _draws_for_each_row(base: Run, run: Run, step: int) -> bool:
    """Return whether more random numbers were drawn for a batch with one row more."""
    seen = []
    for rank in (*base.ranks, *run.ranks):
        private = [e for e in rank["events"] if e["kind"] == "private"]
        seen.append(private[step].get("randomness") if step < len(private) else None)
    half = len(base.ranks)
    return seen[:half] != seen[half:]


def _left_out(rank: dict[str, Any], step: int) -> int:
    """Return how many samples were left out in a step, their gradients not being finite."""
    before = rank["releases"][step - 1]["left_out"] if step else 0
    return int(rank["releases"][step]["left_out"] - before)


def _norm(differences: list[torch.Tensor]) -> float:
    """Return the norm of the change of the sum over ranks, or of all ranks' sums, if larger."""
    sizes = {len(d) for d in differences}
    together = torch.cat(differences)
    total = sum(differences) if len(sizes) == 1 else together
    assert isinstance(total, torch.Tensor)
    of_sum, of_all = float(torch.linalg.vector_norm(total)), float(together.norm())
    return of_sum if not of_sum <= of_all else of_all


class _Difference(NamedTuple):
    """Where two ranks' runs differ first in what is no sum, that in words, and after what."""

    where: str
    message: str
    releases: int


def _first_difference(
    one: dict[str, Any], other: dict[str, Any], sample: str
) -> _Difference | None:
    shows = f"depends on {sample}"
    last = "the start"
    for a, b in zip(one["events"], other["events"], strict=False):
        releases = int(a.get("releases", 0))
        if _is_other(a, b):
            at = [e["where"] or "the end" for e in (a, b)]
            what = f"{at[0]}: whether another step comes, or at {at[1]} instead, {shows}"
            if at[0] == at[1]:
                what = f"{at[0]}: which step comes {shows}"
            return _Difference(at[0], what, releases)
        where, is_private = b["where"], a["kind"] == "private"
        if names := _changed(a.get("before"), b.get("before")):
            what = f"{where}: {_named(names, a['before'], b['before'])} {shows}"
            changed = f"it was changed after {last}, and not by a step of an optimizer"
            return _Difference(where, f"{what}: {changed}", releases)
        if is_private and (problem := _other_settings(one, other, a)):
            return _Difference(a["where"], f"{a['where']}: {problem} {shows}", releases + 1)
        if names := _changed(a.get("after"), b.get("after")):
            what = f"{_named(names, a['after'], b['after'])} {shows}"
            if a["kind"] == "end":
                what = f"{last}: {what}: it was changed after the last step"
                return _Difference(last, what, releases)
            ledger = "" if is_private else ", which is not in the ledger"
            by = f"it was changed by {b['who']}.step() at {where}{ledger}"
            return _Difference(where, f"{where}: {what}: {by}", releases + is_private)
        last = where or last
    if len(one["events"]) != len(other["events"]):
        releases = min(len(one["releases"]), len(other["releases"]))
        return _Difference(last, f"{last}: the number of steps {shows}", releases)
    return None


def _is_other(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return bool((a["kind"], a["who"], a["where"]) != (b["kind"], b["who"], b["where"]))


def _changed(one: Any, other: Any) -> list[str]:
    one, other = one or {}, other or {}
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _named(names: list[str], one: Any, other: Any) -> str:
    first = names[0]
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    old, new = one.get(first), other.get(first)
    if isinstance(old, list) and isinstance(new, list):
        for a, b in zip(old, new, strict=False):
            for key in a:
                if a[key] != b.get(key):
                    return f"{key} ({b.get(key)} with it, {a[key]} without) in the {first}{more}"
    return f"{first}{more}"


def _other_settings(one: dict[str, Any], other: dict[str, Any], event: dict[str, Any]) -> str:
    number = event["releases"]
    if number < min(len(one["releases"]), len(other["releases"])):
        old, new = (run["releases"][number] for run in (one, other))
        if old["drawn"] != new["drawn"]:
            return f"which batch is taken for step {number + 1}"
        old, new = old["settings"], new["settings"]
        names = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
        for name, a, b in zip(names, old, new, strict=True):
            if a != b:
                return f"{name} ({b:g} with it, {a:g} without)"
    return ""
