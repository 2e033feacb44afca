"""Joining two parts of one softmax.

Shapes: B batch, L queries, N query heads, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(out_a_BLNH: Tensor, lse_a_BNL: Tensor, out_b_BLNH: Tensor, lse_b_BNL: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    Returns:
        out_BLNH and lse_BNL, new tensors in the dtype of the LSEs, float32 or wider: cast once, after the last merge. A
        row that sees nothing in either part has out 0 and LSE -inf.
    """
    # From the difference: large LSEs lose no digits. It is NaN only where both are -inf, and there both outputs are 0.
    share_b_BNL = (lse_b_BNL - lse_a_BNL).sigmoid_().nan_to_num_(nan=0.0)
    share_b_BLN1 = share_b_BNL.transpose(1, 2).unsqueeze(-1)
    out_BLNH = torch.lerp(out_a_BLNH.to(share_b_BNL.dtype), out_b_BLNH.to(share_b_BNL.dtype), share_b_BLN1)
    return out_BLNH, torch.logaddexp(lse_a_BNL, lse_b_BNL)
