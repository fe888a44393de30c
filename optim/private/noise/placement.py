"""Rules of noise placement for compressed, distributed gradients.

Accuracy never shows that a guarantee has been lost, so every combination is looked up here before
training starts.  An example, with g_i the clipped sum of rank i (one sample changes one g_i by at
most C), T a compressor and sigma the noise multiplier: "every rank adds N(0, sigma^2 C^2 / N),
compresses and sends" has level sigma only if T is the same linear map on all ranks.  Else the
result is a function of N messages of level sigma / sqrt(N) each, not of the noised sum: an epsilon
of 7.4 becomes 30.7 on 8 ranks.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, get_args, get_origin

from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.accounting.events import GaussianEvent
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.optimizers.descent import NoisedOptimizer
from comm_hooks.requirements import require_choice, require_kind, require_positive, require_within

Unit = Literal["sample", "client"]
Place = Literal["central", "shares", "local", "aggregate"]


@dataclass(frozen=True)
class Scheme:
    """A description of a private step: where and in which order it clips, noises and compresses.

    Attributes:
        unit: the protected unit: a ``"sample"``, or a ``"client"`` with all of its data.
        place: where noise is added, with noise multiplier sigma and clipping norm C: ``"central"``,
            once, to the exact sum; ``"shares"``, sigma C / sqrt(N) on each rank; ``"local"``, all
            of sigma C on each rank; ``"aggregate"``, to the sum of the compressed messages.
        compressor: the compressor of parameters that are not exempt.
        exempt: the compressor of exempt parameters.
        feedback: the vectors with error feedback: ``"before_noise"``, vectors without noise;
            ``"after_noise"``, noised vectors; or ``"none"``.
        feedback_linear: whether residuals are kept in float32; each rank rounds 4 or 16 bits anew.
        world_size: N, the number of ranks.
        clipping: the vector that is clipped to C: ``"unit"``, one sample's gradient or one client's
            delta (parameters before minus after its local steps); ``"message"``, after compression
            (and, unless linear, decompression).
        norm_bound: the largest ratio of a compressed to an uncompressed norm; by default the
            compressor's for one parameter of 2^20 elements.
    """

    unit: Unit = "sample"
    place: Place = "central"
    compressor: Compressor = field(default_factory=Identity)
    exempt: Compressor = field(default_factory=Identity)
    feedback: Literal["none", "before_noise", "after_noise"] = "none"
    feedback_linear: bool = True
    world_size: int = 1
    clipping: Literal["unit", "message"] = "unit"
    norm_bound: float | None = None

    def __post_init__(self) -> None:
        for setting in fields(self):
            if get_origin(setting.type) is Literal:
                value = getattr(self, setting.name)
                require_choice(self, setting.name, value, get_args(setting.type))
        require_kind(self, "compressor", self.compressor, Compressor)
        require_kind(self, "exempt", self.exempt, Compressor)
        require_positive(self, "world_size", self.world_size)
        if self.norm_bound is not None:
            require_within(self, "norm_bound", self.norm_bound, "(0, inf)")

    @classmethod
    def of(cls, exchange: Exchange, place: Place, unit: Unit = "sample", **stated: Any) -> "Scheme":
        """Return the scheme of an exchange of this library; ``stated`` overrides fields.

        Residuals of clients, and residuals with placement ``"aggregate"``, are of vectors without
        noise; all other residuals are of noised vectors.
        """
        feedback = "before_noise" if unit == "client" or place == "aggregate" else "after_noise"
        usual = {
            "compressor": exchange.compressor,
            "exempt": exchange.settings.exempt,
            "feedback": feedback if exchange.memory else "none",
            "feedback_linear": exchange.memory is None or exchange.memory.linear,
            "world_size": exchange.transport.world_size,
            "clipping": "message" if unit == "client" else "unit",
        }
        return cls(unit, place, **{**usual, **stated})

    @property
    def is_linear(self) -> bool:
        """Whether compression is a linear map, the same on all ranks given public state."""
        return self.compressor.linear and self.exempt.linear and not self.compressor.per_rank

    @property
    def is_dense(self) -> bool:
        """Whether nothing is compressed, so that the noise has one variance in all coordinates."""
        return self.compressor == Identity() and self.exempt == Identity()


@dataclass(frozen=True)
class Verdict:
    """The guarantee of a valid :class:`Scheme` with noise multiplier sigma and clipping norm C.

    Attributes:
        rule: the number of the applied rule of noise placement, as in ``docs/private.md``.
        peer_multiplier: the accountant's noise multiplier over sigma, for observers of single
            ranks' messages; 0 for no protection.  For observers of the model it is 1.
        std: the standard deviation of the noise in each vector to which it is added, over sigma C.
        variance_of_sum: the variance of the noise in a coordinate of the sum over ranks, over
            (sigma C)^2; None if compression makes it differ from coordinate to coordinate.
        checkpoint_multiplier: the same as ``peer_multiplier`` for observers of single ranks' saved
            states, residuals included.
    """

    rule: int
    peer_multiplier: float
    std: float
    variance_of_sum: float | None
    checkpoint_multiplier: float = 1.0

    def recorded(self, event: GaussianEvent, placement: str) -> GaussianEvent:
        """Return the event with ``placement`` and this verdict's multipliers for all observers."""
        return replace(
            event,
            placement=placement,
            checkpoint_multiplier=self.checkpoint_multiplier,
            rank_multiplier=self.peer_multiplier,
        )


def _refuse(rule: int, problem: str, instead: str) -> NoReturn:
    raise PrivacyError(f"not private (rule {rule}): {problem}. Valid instead: {instead}")


def judge(scheme: Scheme) -> Verdict:
    """Return the guarantee of a scheme, after a check of all rules of noise placement.

    Raises:
        PrivacyError: for a scheme that is not private, with the rule and a valid alternative.

    Not supported, and refused where they would be needed: integer mechanisms under secure
    aggregation (rule 14), noise on the factors of PowerSGD (rule 15), clipping norms that adapt
    (rule 20).  Taken for granted, since this library offers nothing else: a scaling of
    samples comes before clipping, and is public or follows from releases (rule 16), clients have
    equal weights (rule 11), and the divisor is public (rule 19).

    Example::

        >>> from comm_hooks import RandomK, TopK
        >>> from comm_hooks.optim.private.noise.placement import Scheme, judge
        >>> mask = RandomK(density=0.1, unbiased=False)
        >>> judge(Scheme(place="shares", compressor=mask, world_size=4)).peer_multiplier
        0.5
        >>> judge(Scheme(place="shares", compressor=TopK(density=0.01), world_size=4))
        Traceback (most recent call last):
        comm_hooks.optim.private.errors.PrivacyError: not private (rule 5): shares of noise ...
    """
    if scheme.unit == "client":
        return _judge_client(scheme)
    if scheme.clipping == "message":
        _refuse(
            18,
            "the message of a batch is clipped, in which a sample may take the place of all others",
            "each sample's gradient is clipped: clipping='unit'",
        )
    name = type(scheme.compressor).__name__
    ranks = scheme.world_size
    if scheme.feedback == "before_noise":
        _refuse(
            10,
            "error feedback of gradients without noise releases a sample in later steps in which "
            "it was not drawn, which no accountant of sampled steps covers",
            "error feedback of noised gradients: placement 'central', 'shares' or 'local'",
        )
    variance = 1.0 if scheme.is_dense else None
    if scheme.place == "central":
        return Verdict(2, 0.0, 1.0, variance)
    if scheme.place == "local":
        return Verdict(6, 1.0, 1.0, variance and float(ranks))
    if scheme.place == "shares":
        rounds_feedback = scheme.feedback != "none" and not scheme.feedback_linear
        if not scheme.is_linear or rounds_feedback:
            _refuse(
                5,
                f"shares of noise on {ranks} ranks and then {name}, which is not one linear map "
                "for all ranks (or has rounded error feedback), leave each message with sigma / "
                f"sqrt({ranks})",
                "placement 'local', or 'central'; or a linear compressor (random_k, srht, "
                "count_sketch) with exempt_bits=32, and ErrorFeedback(bits=32)",
            )
        share = 1 / math.sqrt(ranks)
        saved = 1.0 if scheme.feedback == "none" else share
        return Verdict(4, share, share, variance, saved)
    if not scheme.is_linear:
        _refuse(
            8,
            f"noise on the sum of gradients compressed by {name}: one sample can change that sum "
            "by much more than the clipping norm C",
            "placement 'local', or 'central'; or a linear compressor (random_k, srht, "
            "count_sketch) with exempt_bits=32",
        )
    bound = _norm_bound(scheme)
    if math.isinf(bound):
        _refuse(
            9,
            f"{name} has no bound on the norm of a compressed gradient",
            "a compressor with one (random_k, srht, count_sketch), or placement 'shares'",
        )
    rule = 7 if bound <= 1 else 9
    return Verdict(rule, 0.0, bound, variance)


def require_known_variance(optimizer: type, scheme: Scheme) -> None:
    """Raise ``PrivacyError`` if an optimizer needs the noise variance, and it is not known."""
    needs = issubclass(optimizer, NoisedOptimizer) and optimizer.needs_noise_variance
    if needs and judge(scheme).variance_of_sum is None:
        raise PrivacyError(
            f"{optimizer.__name__} subtracts the variance of the noise, which is not known (rule "
            f"17) after compression by {scheme.compressor}: elements are mostly zeros, or have "
            "noise of another size. Valid instead: no compressor, or DPAdam or DPMicroAdam"
        )


def _judge_client(scheme: Scheme) -> Verdict:
    if scheme.place != "aggregate":
        _refuse(
            11,
            f"at client level placement {scheme.place!r} is not offered: sums of clients' deltas "
            "are noised on arrival",
            "placement 'aggregate'",
        )
    if scheme.clipping != "message" and _norm_bound(scheme) > 1:
        _refuse(
            12,
            f"a client's delta is clipped before {scheme.compressor}, which may increase its norm",
            "clip the message again on arrival: clipping='message'",
        )
    rule = 13 if scheme.is_linear and not scheme.is_dense else 11
    variance = 1.0 if scheme.is_dense else None
    # Ranks save clients' residuals, and the number of clients that were drawn.
    return Verdict(rule, 0.0, 1.0, variance, checkpoint_multiplier=0.0)


def _norm_bound(scheme: Scheme) -> float:
    if scheme.norm_bound is not None:
        return scheme.norm_bound
    compressed = scheme.compressor.norm_bound(1 << 20, world_size=scheme.world_size)
    return max(compressed, scheme.exempt.norm_bound(1))
