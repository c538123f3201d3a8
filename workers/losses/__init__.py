"""The losses, one per file, grouped by what they score: log-probabilities, a critic's values, or a draft's predictions.

To add one, write its file, add its line here, and add its reference formula to FORMULAS in
tests/workers/losses/test_losses.py, whose tests are parametrized over both. The losses of drafts have their references
with the tests of their algorithms, in tests/workers/drafts/.
"""

from .capture import CAPTURE
from .cispo import CISPO
from .cross_entropy import CROSS_ENTROPY
from .dflash import DFLASH
from .dro import DRO
from .eagle3 import EAGLE3
from .gspo import GSPO
from .importance_sampling import IMPORTANCE_SAMPLING
from .loss import Loss, LossOutput
from .ppo import PPO
from .stable_reinforce import STABLE_REINFORCE
from .value_mse import VALUE_MSE

LOSSES: dict[str, Loss] = {
    "cross_entropy": CROSS_ENTROPY,
    "importance_sampling": IMPORTANCE_SAMPLING,
    "ppo": PPO,
    "cispo": CISPO,
    "dro": DRO,
    "gspo": GSPO,
    "stable_reinforce": STABLE_REINFORCE,
}

VALUE_LOSSES: dict[str, Loss] = {"value_mse": VALUE_MSE}

DRAFT_LOSSES: dict[str, Loss] = {"eagle3": EAGLE3, "dflash": DFLASH}

CAPTURES: dict[str, Loss] = {"capture": CAPTURE}

__all__ = ["CAPTURES", "DRAFT_LOSSES", "LOSSES", "VALUE_LOSSES", "Loss", "LossOutput"]
