"""The losses, one per file, grouped by what they score: log-probabilities or a critic's values.

To add one, write its file, add its line here (and to the sets of schemas/training.py if it clips, draws random numbers
or reads recordings, which the server must know), and add its reference formula to FORMULAS in
tests/workers/losses/test_losses.py and in test_edges.py, whose tests are parametrized over both.
"""

from .cispo import CISPO
from .cross_entropy import CROSS_ENTROPY
from .dro import DRO
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

__all__ = ["LOSSES", "VALUE_LOSSES", "Loss", "LossOutput"]
