"""Two runs that differ in one sample: everything else is equal, and that by no more than C."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.audit.script.noise import drawn_of
from benchmarks.audit.script.run import Run

# Roundings of a clipped gradient in float32, and of each row of a sum.
_SLACK = 1e-4
_SUM_SLACK = 1e-6
# With one row less, kernels add up in another order, and a ReLU may change sides.
_OTHER_SHAPE_SLACK = 1e-2


@dataclass(frozen=True)
class Twins:
    """The effect of one sample.

    Attributes:
        planted: the sample and its kind.
        drawn: the number of steps with the sample in the batch.
        largest: change of a clipped sum, over C; None if none was compared.
        problems: one line for each other effect.
    """

    planted: str
    drawn: int
    largest: float | None
    problems: list[str]


def compare(base: Run, run: Run, reference: Run, unit: str) -> Twins:
    """Compare a run with its neighbour's.

    1. parameters, buffers, settings of optimizers and of the mechanism are equal, bit by bit,
       before and after every step of any optimizer: both continued with the same releases;
    2. sums of steps without the sample are equal, bit by bit;
    3. those of the others differ by at most C (1 + 10^-4), over all ranks together.

    Args:
        base, run: one has the sample, the other lacks it or has another one in its place.
        reference: the followed run, which tells the draws.
        unit: ``"sample"`` or ``"client"``.
    """
    planted = run.variant.plant or base.variant.plant
    assert planted is not None
    kind = run.variant.plant.kind if run.variant.plant else "as it is"
    name = planted.name(unit)
    drawn = [planted.place(0, indices) is not None for indices in drawn_of(reference)]
    problems: list[str] = []
    largest: float | None = None
    pairs = list(zip(base.ranks, run.ranks, strict=True))
    comparable = min(len(r["releases"]) for r in (*base.ranks, *run.ranks))
    for rank, (one, two) in enumerate(pairs):
        found = _first_difference(one, two, name)
        if found:
            comparable = min(comparable, found.releases)
            if found.message not in problems:
                of_rank = f" (rank {rank})" if len(pairs) > 1 and not problems else ""
                problems.append(found.message + of_rank)
    same_shape = all(
        r.variant.plant is None or r.variant.plant.kind != "absent" for r in (base, run)
    )
    for step in range(comparable):
        releases = [(a["releases"][step], b["releases"][step]) for a, b in pairs]
        where, settings = releases[0][1]["where"], releases[0][1]["settings"]
        differences = [b["sums"].double() - a["sums"].double() for a, b in releases]
        size = _norm(differences) / settings[1]
        if step >= len(drawn) or not drawn[step]:
            if any(bool((d != 0).any()) for d in differences):
                problems.append(
                    f"{where}: in step {step + 1} the clipped sum depends on {name} ({kind}), "
                    f"which was not drawn for it: by {size:.3g} C"
                )
                break
            continue
        if not same_shape and _draws_for_each_row(base, run, step):
            continue
        if base.variant.plant and base.variant.plant.kind == "not finite":
            # If the NaN sample still counts, the two may differ by 2 C.
            if not any(_left_out(rank, step) for rank in base.ranks):
                continue
        largest = max(largest or 0.0, size)
        rows = len(drawn_of(reference)[step])
        slack = _SLACK + rows * _SUM_SLACK + (0.0 if same_shape else _OTHER_SHAPE_SLACK)
        if not size <= 1 + slack:
            problems.append(
                f"{where}: {name} ({kind}) changes the clipped sum of step {step + 1} by "
                f"{size:.4g} C, and the noise is made for C"
            )
            break
    return Twins(f"{name}, {kind}", sum(drawn), largest, problems[:3])


def first_difference(one: Run, other: Run) -> str | None:
    """Return the place of the first difference of two runs of one variant, or None."""
    for a, b in zip(one.ranks, other.ranks, strict=True):
        if found := _first_difference(a, b, "nothing"):
            return found.where
        for x, y in zip(a["releases"], b["releases"], strict=False):
            if not torch.equal(x["sums"], y["sums"]):
                return f"{x['where']}: clipped sums"
    return None


def _draws_for_each_row(base: Run, run: Run, step: int) -> bool:
    """Return whether a batch with one row more consumed more random numbers."""

    def seen(rank: dict[str, Any]) -> Any:
        private = [e for e in rank["events"] if e["kind"] == "private"]
        return private[step].get("randomness") if step < len(private) else None

    return [seen(rank) for rank in base.ranks] != [seen(rank) for rank in run.ranks]


def _left_out(rank: dict[str, Any], step: int) -> int:
    """Return the number of samples of a step with a gradient that is not finite."""
    before = rank["releases"][step - 1]["left_out"] if step else 0
    return int(rank["releases"][step]["left_out"] - before)


def _norm(differences: list[torch.Tensor]) -> float:
    """Return the norm of the change of the sum over ranks, or of all ranks' sums, if larger."""
    together = torch.cat(differences)
    same_size = len({len(d) for d in differences}) == 1
    total = torch.stack(differences).sum(0) if same_size else together
    of_sum, of_all = float(total.norm()), float(together.norm())
    return of_sum if not of_sum <= of_all else of_all


class _Difference(NamedTuple):
    """The first difference of two ranks' runs, and the number of releases before it."""

    where: str
    message: str
    releases: int


def _first_difference(
    one: dict[str, Any], other: dict[str, Any], sample: str
) -> _Difference | None:
    shows = f"depends on {sample}"
    last = "the start"
    for a, b in zip(one["events"], other["events"], strict=False):
        releases, where, is_private = int(a.get("releases", 0)), b["where"], a["kind"] == "private"
        if any(a[key] != b[key] for key in ("kind", "who", "where")):
            at, instead = (e["where"] or "the end" for e in (a, b))
            what = f"whether another step comes, or at {instead} instead,"
            what = "the kind of the step" if at == instead else what
            return _Difference(at, f"{at}: {what} {shows}", releases)
        if what := _changed(a.get("before"), b.get("before")):
            changed = f"it was changed after {last}, and not by a step of an optimizer"
            return _Difference(where, f"{where}: {what} {shows}: {changed}", releases)
        if is_private and (what := _other_settings(one, other, a["releases"])):
            return _Difference(where, f"{where}: {what} {shows}", releases + 1)
        if what := _changed(a.get("after"), b.get("after")):
            if a["kind"] == "end":
                what = f"{last}: {what} {shows}: it was changed after the last step"
                return _Difference(last, what, releases)
            ledger = "" if is_private else ", which is not in the ledger"
            by = f"it was changed by {b['who']}.step() at {where}{ledger}"
            return _Difference(where, f"{where}: {what} {shows}: {by}", releases + is_private)
        last = where or last
    if len(one["events"]) != len(other["events"]):
        releases = min(len(one["releases"]), len(other["releases"]))
        return _Difference(last, f"{last}: the number of steps {shows}", releases)
    return None


def _changed(one: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """Return the name of the first different state, and the number of the others."""
    one, other = one or {}, other or {}
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if not names:
        return ""
    first, more = names[0], f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    old, new = one.get(first), other.get(first)
    if isinstance(old, list) and isinstance(new, list):
        for a, b in zip(old, new, strict=False):
            for key in (key for key in a if a[key] != b.get(key)):
                return f"{key} ({b.get(key)} with it, {a[key]} without) in the {first}{more}"
    return f"{first}{more}"


def _other_settings(one: dict[str, Any], other: dict[str, Any], number: int) -> str:
    if number >= min(len(one["releases"]), len(other["releases"])):
        return ""
    old, new = (run["releases"][number] for run in (one, other))
    if old["drawn"] != new["drawn"]:
        return f"which batch is taken for step {number + 1}"
    names = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
    for name, a, b in zip(names, old["settings"], new["settings"], strict=True):
        if a != b:
            return f"{name} ({b:g} with it, {a:g} without)"
    return ""
