"""Checkpoints of a matrix whose rows lie on different ranks: widened to one DTensor in state dicts and only there.

As parameters, rows live on the mesh of the rest of the model, which clipping and optimizers need. A checkpoint would
take the rows of every pipeline rank for the same matrix; here they become what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from slimpipe.vocabulary.rows import VocabularyRows


class WholeMatrix:
    """Turns this rank's rows into their place in the whole matrix, and back. Both share the rows' storage.

    Args:
        mesh: All ranks, with axes for replicas, and for the outer and the inner cut of the rows, each cut as by
            ``Shard(0)``; no axis need divide the rows.
        num_rows: Of the whole matrix.
    """

    def __init__(self, mesh: DeviceMesh, *, num_rows: int) -> None:
        self._mesh, self._num_rows = mesh, num_rows

    def widen(self, rows: DTensor) -> DTensor:
        """The whole matrix."""
        num_columns = rows.shape[1]
        return DTensor.from_local(
            rows.to_local(),
            self._mesh,
            (Replicate(), Shard(0), Shard(0)),
            shape=torch.Size((self._num_rows, num_columns)),
            stride=(num_columns, 1),
        )

    def narrow(self, whole: DTensor, *, like: Tensor) -> DTensor:
        """This rank's rows again, placed like its parameter."""
        assert whole.device_mesh == self._mesh and isinstance(like, DTensor)
        return DTensor.from_local(
            whole.to_local(), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )

    def install_in_module(self, module: VocabularyRows) -> None:
        """Widen ``module.weight`` in state dicts, and expect it so when they are loaded."""

        def widen(module: VocabularyRows, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
            state_dict[f"{prefix}weight"] = self.widen(state_dict[f"{prefix}weight"])

        def narrow(module: VocabularyRows, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
            if (whole := state_dict.get(f"{prefix}weight")) is not None:
                state_dict[f"{prefix}weight"] = self.narrow(whole, like=module.weight)

        module.register_state_dict_post_hook(widen)
        module.register_load_state_dict_pre_hook(narrow)

    @staticmethod
    def install_in_optimizer(optimizer: Optimizer, matrices: Mapping[nn.Parameter, WholeMatrix]) -> None:
        """The same for what the optimizer keeps of each of these parameters and has its shape."""

        def converted(
            optimizer: Optimizer,
            state_dict: dict[str, Any],
            convert: Callable[[WholeMatrix, DTensor, Tensor], DTensor],
        ) -> dict[str, Any]:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            state = dict(state_dict["state"])  # its values are the optimizer's own
            for index, values in state.items():
                if (matrix := matrices.get(parameters[index])) is not None:
                    state[index] = {
                        name: convert(matrix, value, parameters[index]) if isinstance(value, DTensor) else value
                        for name, value in values.items()
                    }
            return {**state_dict, "state": state}

        optimizer.register_state_dict_post_hook(
            lambda optimizer, state: converted(optimizer, state, lambda matrix, value, _: matrix.widen(value))
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda optimizer, state: converted(
                optimizer, state, lambda matrix, value, like: matrix.narrow(value, like=like)
            )
        )
