"""The vocabulary that all ranks of a pipeline share, as one more model part of torchtitan.

The rows of a matrix are cut over pipeline x tensor parallel ranks, and these by FSDP2 over the data parallel ones.

Shapes: B batch, L slice, V vocabulary, R rows of this rank, D model dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division, enable_fsdp_symm_mem
from torchtitan.distributed.full_dtensor import resolve_fsdp_mesh
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.distributed.spmd_types import set_current_spmd_mesh
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from slimpipe.torchtitan.cpu import reduce_with_sums, use_cpu
from slimpipe.torchtitan.whole_matrix import WholeMatrix
from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead
from slimpipe.vocabulary.rows import VocabularyRows

Init = Callable[[Tensor], object]


class TitanVocabularyHead(VocabularyHead):
    """`VocabularyHead` that is called as torchtitan calls a loss."""

    def forward(  # type: ignore[override]
        self, hidden_BLD: Tensor, labels_BL: Tensor, *, global_valid_tokens: Tensor | None = None
    ) -> Tensor:
        """See `VocabularyHead.forward`; ``global_valid_tokens`` is its denominator."""
        return super().forward(hidden_BLD, labels_BL, denominator=global_valid_tokens)


class EmbeddedInput(Module):
    """Stands where the first stage had its embedding: the input is embedded already.

    Under tensor parallelism it is still a sum over ranks; it leaves as the embedding's output would.
    """

    def __init__(self, embedding: ShardingConfig | None) -> None:
        super().__init__()
        if embedding is not None:
            self._sharding_config = ShardingConfig(
                out_src_shardings=embedding.out_src_shardings, out_dst_shardings=embedding.out_dst_shardings
            )

    def forward(self, input: Tensor) -> Tensor:
        """The input."""
        return input


class SharedVocabulary(nn.Module):
    """This rank's rows of the output matrix and, where shared, of the embedding: a part of the model without forward.

    Its state dict has the stock names, ``lm_head.weight`` and ``tok_embeddings.weight``, and under each the whole
    matrix as one DTensor, see `WholeMatrix`. Its optimizer's state dict has after `keep_optimizer_state_whole`.

    Args:
        mesh: As of `vocabulary_mesh`.
        lm_head: Output layer and loss.
        tok_embeddings: Input embedding; None where the first stage has it.
        inits: What fills a matrix with its first values, by name of the module; called with some rows of it.
    """

    lm_head: TitanVocabularyHead
    tok_embeddings: VocabularyEmbedding | None

    def __init__(
        self,
        mesh: DeviceMesh,
        *,
        lm_head: TitanVocabularyHead,
        tok_embeddings: VocabularyEmbedding | None,
        inits: dict[str, Init],
    ) -> None:
        super().__init__()
        self.lm_head, self.tok_embeddings = lm_head, tok_embeddings
        self._mesh, self._inits = mesh, inits

    @property
    def matrices(self) -> dict[str, VocabularyRows]:
        """By name of the module."""
        return {name: rows for name, rows in self.named_children() if isinstance(rows, VocabularyRows)}

    def init_weights(self, *, buffer_device: torch.device | None = None) -> None:
        """Fills the rows as torchtitan's model does, with numbers of their own on every rank."""
        shard = self._mesh.get_local_rank("rows") * self._mesh.shape[-1] + self._mesh.get_local_rank("shard")
        for name, rows in self.matrices.items():
            weight = rows.weight
            assert isinstance(weight, DTensor)
            # Ranks of one stage draw the same numbers from here on, before and after.
            seed = int(torch.randint(2**62, (), device="cpu")) + shard
            devices = [] if weight.device.type == "cpu" else [weight.device]
            with torch.random.fork_rng(devices, device_type=weight.device.type):
                torch.manual_seed(seed)
                self._inits[name](weight.to_local())

    def keep_state_whole(self) -> None:
        """Makes the state dict say which rows of the whole matrix these are."""
        for rows in self.matrices.values():
            WholeMatrix(self._mesh, num_rows=rows.vocab_size).install_in_module(rows)

    def keep_optimizer_state_whole(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """The same for the state of the optimizers that hold these rows."""
        matrices = {rows.weight: WholeMatrix(self._mesh, num_rows=rows.vocab_size) for rows in self.matrices.values()}
        for optimizer in optimizers:
            if matrices.keys() & {parameter for group in optimizer.param_groups for parameter in group["params"]}:
                WholeMatrix.install_in_optimizer(optimizer, matrices)


def vocabulary_mesh(parallel_dims: ParallelDims) -> DeviceMesh:
    """All ranks, with axes "replicate", "rows" (pipeline x tensor parallel, the ranks that hold different rows) and
    "shard" (of FSDP2). Collective over all ranks."""
    everyone = parallel_dims.world_mesh
    ranks = everyone.mesh.view(
        parallel_dims.pp, parallel_dims.dp_replicate, parallel_dims.dp_shard, parallel_dims.tp
    )  # as torchtitan's build_mesh numbers them; cp is 1
    ranks = ranks.permute(1, 0, 3, 2).flatten(1, 2)
    return DeviceMesh(everyone.device_type, ranks, mesh_dim_names=("replicate", "rows", "shard"))


def share_vocabulary(
    model: Decoder,
    *,
    vocab_parallel: str,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
) -> SharedVocabulary:
    """Takes the output layer, and with "both" the embedding, out of a model that torchtitan will then split.

    What stays returns hidden states after the final norm; with "both", its input is embedded already. Collective over
    all ranks.

    Args:
        model: The whole model, on the meta device; it is changed.
        vocab_parallel: "output" or "both".
        parallel_dims: torchtitan's.
        training: torchtitan's section.
        parallelism: torchtitan's section.

    Returns:
        The rows of this rank, sharded by FSDP2 and still on the meta device.
    """
    mesh = vocabulary_mesh(parallel_dims)
    lm_head, tok_embeddings = model.lm_head, model.tok_embeddings
    part = SharedVocabulary(
        mesh,
        lm_head=TitanVocabularyHead.from_linear(lm_head, group=mesh["rows"], ignore_index=IGNORE_INDEX, reduce_to=None),
        tok_embeddings=(
            VocabularyEmbedding.from_embedding(tok_embeddings, group=mesh["rows"], reduce_to=None)
            if vocab_parallel == "both"
            else None
        ),
        inits={
            # Where the model sets none, its modules do as torch's own.
            "lm_head": (model.config.lm_head.param_init or {}).get(
                "weight", functools.partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
            ),
            "tok_embeddings": (model.config.tok_embeddings.param_init or {}).get("weight", nn.init.normal_),
        },
    )
    model.lm_head = None
    if vocab_parallel == "both":
        model.tok_embeddings = EmbeddedInput(model.config.tok_embeddings.sharding_config)
    _shard(part, parallel_dims, training, parallelism)
    part.keep_state_whole()
    return part


def _shard(
    part: SharedVocabulary, parallel_dims: ParallelDims, training: TrainingConfig, parallelism: ParallelismConfig
) -> None:
    """Applies FSDP2 as torchtitan does to the rest of the model: gradients must lie on one mesh to be clipped."""
    fsdp_mesh, fsdp_axes = resolve_fsdp_mesh(parallel_dims)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    # To FSDP2, a rank's rows are a matrix cut over tensor parallel ranks, like torchtitan's own.
    layout = {MeshAxisName.DP: spmd.R, MeshAxisName.CP: spmd.R, MeshAxisName.TP: spmd.S(0)}
    for rows in part.matrices.values():
        with set_current_spmd_mesh(parallel_dims.spmd_dense_mesh()):
            spmd.assert_type(rows.weight, layout)
        # Backward does not read the weight, but the next slice's forward does.
        fully_shard(rows, mesh=fsdp_mesh, dp_mesh_dims=fsdp_axes, mp_policy=policy, reshard_after_forward=False)
    disable_fsdp_gradient_division(part)
    if parallelism.enable_fsdp_symm_mem:
        enable_fsdp_symm_mem(part)
    if use_cpu():
        reduce_with_sums(part)
