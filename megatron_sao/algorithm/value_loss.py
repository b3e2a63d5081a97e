"""Value loss: squared error to the lambda return over all action tokens (arXiv 2607.07508, section 3.2). A sum."""

from torch import Tensor


def value_loss(values_A: Tensor, targets_A: Tensor) -> Tensor:
    """Sum of (V - target)^2 over action tokens [A], float32, with its graph.

    The caller divides by the global number of action tokens: a mean of micro-batch means would make the critic's rate
    vary with packing. Tokens that DIS rejects count here like any other.
    """
    assert values_A.shape == targets_A.shape, f"{tuple(values_A.shape)} values, {tuple(targets_A.shape)} targets"
    error = values_A.float() - targets_A.detach().float()
    return (error * error).sum()
