"""The interface of an attention kernel, and how a kernel that knows no masks serves one: block by block.

Shapes: B batch, L queries, K keys, N query heads, G K,V heads (N is a multiple of G), H head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from slimpipe.attention.kernels.merge import merge
from slimpipe.attention.mask import Mask
from slimpipe.dtypes import wide_dtype


class AttentionKernel(ABC):
    """Attention of queries on one part of their keys, such as a slice's own keys or its past ones.

    K,V are read in place, so they may be strided views of a larger buffer, and their heads are never repeated. Kernels
    hold no state. The head dim of V may differ from that of Q and K where the kernel does not refuse it.
    """

    name: ClassVar[str]

    @abstractmethod
    def refusal(self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor) -> str | None:
        """Why this kernel cannot serve tensors like these, to be read after its name; None if it can."""

    def forward(
        self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, *, causal: bool, scale: float, mask: Mask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Softmax attention over these keys alone.

        Args:
            causal: Query l sees keys 0..l; L must equal K.
            scale: Factor on the scores.
            mask: What may be seen at all, if not everything.

        Returns:
            out_BLNH in the dtype of q or wider, and lse_BNL (any strides) in float32 or wider. A row that sees nothing
            has out 0 and LSE -inf.

        Raises:
            ValueError: the shapes or dtypes do not fit together.
        """
        check_shapes(q_BLNH, k_BKGH, v_BKGH, causal=causal)
        if mask is None:
            return self._forward(q_BLNH, k_BKGH, v_BKGH, causal, None, scale)
        assert mask.shape_BLK == (*q_BLNH.shape[:2], k_BKGH.shape[1]), "the mask is of another slice or K,V view"
        return self._masked_forward(q_BLNH, k_BKGH, v_BKGH, causal, scale, mask)

    def backward(
        self,
        dout_BLNH: Tensor,
        q_BLNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        out_BLNH: Tensor,
        lse_BNL: Tensor,
        *,
        causal: bool,
        scale: float,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The share of these keys in the gradient of a whole attention row.

        Args:
            dout_BLNH: Gradient of the whole row's output, in the dtype of q.
            out_BLNH: Output of the whole row, merged over all parts, in the dtype of q.
            lse_BNL: LSE of the whole row, merged over all parts, as `forward` and `merge` give it.
            causal, scale, mask: As in `forward`.

        Returns:
            dq_BLNH (add up over the parts), dk_BKGH, dv_BKGH, each in the dtype of q or wider.
        """
        check_shapes(q_BLNH, k_BKGH, v_BKGH, causal=causal)
        tensors = dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL
        if mask is None:
            return self._backward(*tensors, causal, None, scale)
        assert mask.shape_BLK == (*q_BLNH.shape[:2], k_BKGH.shape[1]), "the mask is of another slice or K,V view"
        return self._masked_backward(*tensors, causal, scale, mask)

    @abstractmethod
    def _forward(
        self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, causal: bool, left: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`forward` where every query sees all keys, or with ``causal`` the earlier ones; ``left`` as in `Block`."""

    @abstractmethod
    def _backward(
        self,
        dout_BLNH: Tensor,
        q_BLNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        out_BLNH: Tensor,
        lse_BNL: Tensor,
        causal: bool,
        left: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` where every query sees all keys, or with ``causal`` the earlier ones; ``left`` as in `Block`."""

    def _masked_forward(
        self, q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, causal: bool, scale: float, mask: Mask
    ) -> tuple[Tensor, Tensor]:
        if mask.is_one_band:
            return self._forward(q_BLNH, k_BKGH, v_BKGH, causal, mask.left, scale)
        B, L, N, _ = q_BLNH.shape
        wide = wide_dtype(q_BLNH.dtype)
        out_BLNH = q_BLNH.new_zeros((B, L, N, v_BKGH.shape[-1]), dtype=wide)
        lse_BNL = q_BLNH.new_full((B, N, L), -float("inf"), dtype=wide)
        for block in mask.blocks:
            rows, queries, keys = block.rows, block.queries, block.keys
            kv = k_BKGH[rows, keys], v_BKGH[rows, keys]
            part = self._forward(q_BLNH[rows, queries], *kv, causal, block.left, scale)
            # A query whose keys lie in several blocks sees their union.
            merged = merge(out_BLNH[rows, queries], lse_BNL[rows, :, queries], *part)
            out_BLNH[rows, queries], lse_BNL[rows, :, queries] = merged
        return out_BLNH, lse_BNL

    def _masked_backward(
        self,
        dout_BLNH: Tensor,
        q_BLNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        out_BLNH: Tensor,
        lse_BNL: Tensor,
        causal: bool,
        scale: float,
        mask: Mask,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask.is_one_band:
            tensors = dout_BLNH, q_BLNH, k_BKGH, v_BKGH, out_BLNH, lse_BNL
            return self._backward(*tensors, causal, mask.left, scale)
        dq_BLNH = q_BLNH.new_zeros(q_BLNH.shape, dtype=wide_dtype(q_BLNH.dtype))
        dk_BKGH, dv_BKGH = k_BKGH.new_zeros(k_BKGH.shape), v_BKGH.new_zeros(v_BKGH.shape)
        for block in mask.blocks:
            rows, queries, keys = block.rows, block.queries, block.keys
            dq_part, dk_part, dv_part = self._backward(
                dout_BLNH[rows, queries],
                q_BLNH[rows, queries],
                k_BKGH[rows, keys],
                v_BKGH[rows, keys],
                out_BLNH[rows, queries],
                lse_BNL[rows, :, queries],
                causal,
                block.left,
                scale,
            )
            dq_BLNH[rows, queries] += dq_part
            dk_BKGH[rows, keys], dv_BKGH[rows, keys] = dk_part, dv_part  # no key is in two blocks of a row
        return dq_BLNH, dk_BKGH, dv_BKGH


def head_dim_contiguous(x: Tensor) -> Tensor:
    """The tensor itself, or a copy where its last stride is not 1: flash kernels take any other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def check_shapes(q_BLNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, *, causal: bool = False) -> None:
    """Raises ValueError if q, k and v do not fit together."""
    q, k, v = tuple(q_BLNH.shape), tuple(k_BKGH.shape), tuple(v_BKGH.shape)
    shapes = f"q {q}, k {k}, v {v}"
    if not len(q) == len(k) == len(v) == 4:
        raise ValueError(f"{shapes}: each must have 4 dimensions (batch, tokens, heads, head dim)")
    if q[0] != k[0] or k[:3] != v[:3]:
        raise ValueError(f"{shapes}: batch must be equal in all three, tokens and heads in k and v")
    if q[3] != k[3]:
        raise ValueError(f"{shapes}: the head dim of k must equal that of q, {q[3]}")
    if 0 in q or 0 in k or 0 in v:
        raise ValueError(f"{shapes}: no dimension may be 0; skip attention on no keys")
    if q[2] % k[2]:
        nearest = max(heads for heads in range(1, k[2]) if q[2] % heads == 0)
        raise ValueError(
            f"{shapes}: the {q[2]} query heads must be a multiple of the K,V heads; nearest legal number: {nearest}"
        )
    if causal and q[1] != k[1]:
        raise ValueError(f"{shapes}: causal attention needs as many keys as queries, {q[1]}")
    if not q_BLNH.dtype == k_BKGH.dtype == v_BKGH.dtype:
        raise ValueError(f"q is {q_BLNH.dtype}, k {k_BKGH.dtype}, v {v_BKGH.dtype}: their dtypes must be equal")
