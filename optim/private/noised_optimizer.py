"""The contract between the mechanism and the optimizers that know that there is noise."""

from typing import ClassVar

from comm_hooks.optim.exact_state import ExactStateOptimizer
from comm_hooks.optim.private.clipped_sum import PublicTransform


class NoisedOptimizer(ExactStateOptimizer):
    """An optimizer whose ``p.grad`` is a noised mean of clipped per-sample gradients.

    Everything it keeps is post-processing of what was released, so it may be saved and shown, as
    long as the gradients really are noised: :class:`~comm_hooks.optim.private.PrivacyEngine` sees
    to it.  Any :class:`torch.optim.Optimizer` can take this place; this class is for those that

    * use the variance of the noise (:attr:`noise_variance`), or
    * transform every sample's gradient before it is clipped (:meth:`transform`).

    Attributes:
        noise_variance: of the noise in one coordinate of ``p.grad``, set before every step; None
            where compression made it unknown.
        needs_noise_variance: whether a step cannot do without.
    """

    needs_noise_variance: ClassVar[bool] = False
    noise_variance: float | None = None

    def transform(self) -> PublicTransform | None:
        """Return what to do to every sample's gradient of the coming step; None for nothing.

        Called once per step, before the first sample, with one tensor for each parameter in the
        order of the parameter groups.
        """
        return None
