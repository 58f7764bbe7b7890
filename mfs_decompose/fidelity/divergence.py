"""Figures of every scored token from two tensors of logits, in float64, a few positions at a time."""

from __future__ import annotations

import torch

from mfs_decompose.fidelity.figures import TokenFigures

# Logits turned into float64 at once: 32 MB a temporary, so [T, V] in float64 never exists for large vocabularies.
# A constant, and never taken from free memory: figures must not depend on the machine's load.
CHUNK_ELEMENTS = 4 * 2**20


def compare_logits(
    original_TV: torch.Tensor,
    other_TU: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenFigures:
    """Score the same T positions by two models.

    KL is `sum_v p_original(v) (ln p_original(v) - ln p_other(v))` in nats; exactly 0 for equal logits, and what
    rounding leaves below 0 is 0. Where the vocabularies differ in size, both distributions are cut to the leading
    rows that they share and renormalised. top1 is 1 where both have the same most likely token, else 0. A position
    with a logit that is not finite has NaN figures, for the model it comes from and for what is computed from both.

    Args:
        original_TV: logits of the original, any float dtype.
        other_TU: logits of what is compared with it, on the same device.
        targets_T: the token at each position, each below min(V, U).
        chunk_elements: logits turned into float64 at a time.

    Returns:
        T figures of each kind, on the CPU.
    """
    shared = min(original_TV.shape[-1], other_TU.shape[-1])
    assert original_TV.shape[0] == other_TU.shape[0] == targets_T.shape[0], "unlike numbers of positions"
    assert int(targets_T.max()) < shared, "a target outside the shared vocabulary"
    step = max(1, chunk_elements // shared)
    columns_4T = torch.empty((4, targets_T.shape[0]), dtype=torch.float64)
    for start in range(0, targets_T.shape[0], step):
        rows = slice(start, start + step)
        columns_4T[:, rows] = _compare_chunk(
            original_TV[rows, :shared].double(), other_TU[rows, :shared].double(), targets_T[rows]
        ).cpu()
    nll_original, nll_x, kl, top1 = columns_4T.numpy()
    return TokenFigures(nll_original=nll_original, nll_x=nll_x, kl=kl, top1=top1)


def _compare_chunk(original_TV: torch.Tensor, other_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """[4, T]: NLL of the original, NLL of the other, KL, top-1 agreement."""
    agree_T = (original_TV.argmax(-1) == other_TV.argmax(-1)).double()
    log_p_TV = original_TV.log_softmax(-1)
    log_q_TV = other_TV.log_softmax(-1)
    # NaN and inf make a whole row NaN and -inf stays, so the least entry tells, four times faster than isfinite().
    broken_T = ~log_p_TV.amin(-1).isfinite()
    other_broken_T = ~log_q_TV.amin(-1).isfinite()
    kl_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1).clamp(min=0)
    nll_T = -log_p_TV.gather(-1, targets_T[:, None])[:, 0]
    other_nll_T = -log_q_TV.gather(-1, targets_T[:, None])[:, 0]
    # Explicitly: a -inf at another token would leave the NLL finite, and NaN logits still have an argmax.
    nan = float("nan")
    either_T = broken_T | other_broken_T
    return torch.stack(
        [
            nll_T.masked_fill(broken_T, nan),
            other_nll_T.masked_fill(other_broken_T, nan),
            kl_T.masked_fill(either_T, nan),
            agree_T.masked_fill(either_T, nan),
        ]
    )
