"""Private training: per-sample clipping, noise, and privacy accounting.

Start with :class:`PrivacyEngine`.  :mod:`~comm_hooks.optim.private.accounting` has the accountants,
:mod:`~comm_hooks.optim.private.noise.placement` the rules of noise placement.
"""

from comm_hooks.optim.private.accounting.ledger import Ledger
from comm_hooks.optim.private.client_level import PrivateParticipation
from comm_hooks.optim.private.data.poisson import PoissonLoader, PoissonSampler, private_loader
from comm_hooks.optim.private.dp_optimizer import DPOptimizer
from comm_hooks.optim.private.engine import PrivacyEngine
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.clipping import (
    ClippedGradients,
    ClippedSum,
    PublicTransform,
)
from comm_hooks.optim.private.gradients.model_checks import check_model, replace_batch_norm
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism, Released
from comm_hooks.optim.private.noise.placement import Scheme, Verdict, judge
from comm_hooks.optim.private.noise.secret import Secret
from comm_hooks.optim.private.optimizers.ada_dps import AdaDPS, AdaS
from comm_hooks.optim.private.optimizers.descent import NoisedOptimizer
from comm_hooks.optim.private.optimizers.dp2 import DP2
from comm_hooks.optim.private.optimizers.dp_adam import DPAdam, DPAdamBC, suggested_gamma
from comm_hooks.optim.private.optimizers.dp_micro_adam import DPMicroAdam
from comm_hooks.optim.private.optimizers.dp_sgd import DPSGD, DPRMSProp
from comm_hooks.optim.private.optimizers.public_knowledge import (
    PublicGradients,
    mean_tf_idf,
    tf_idf,
    token_frequency,
)
from comm_hooks.optim.private.optimizers.scale_then_privatize import ScaleThenPrivatize
from comm_hooks.optim.private.rank_level import RankLevel

__all__ = [
    "AdaDPS",
    "AdaS",
    "ClippedGradients",
    "ClippedSum",
    "DP2",
    "DPAdam",
    "DPAdamBC",
    "DPMicroAdam",
    "DPOptimizer",
    "DPRMSProp",
    "DPSGD",
    "GaussianMechanism",
    "Ledger",
    "NoisedOptimizer",
    "PerSampleGradients",
    "PoissonLoader",
    "PoissonSampler",
    "PrivacyEngine",
    "PrivacyError",
    "PrivateParticipation",
    "PublicGradients",
    "PublicTransform",
    "RankLevel",
    "Released",
    "ScaleThenPrivatize",
    "Scheme",
    "Secret",
    "Verdict",
    "check_model",
    "judge",
    "mean_tf_idf",
    "private_loader",
    "replace_batch_norm",
    "suggested_gamma",
    "tf_idf",
    "token_frequency",
]
