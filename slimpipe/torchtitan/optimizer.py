"""torchtitan's optimizers for a model of which one part holds nothing but vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.distributed import ParallelDims

from slimpipe.torchtitan.rules import optimizer_group_of
from slimpipe.torchtitan.vocabulary import SharedVocabulary


class SlimPipeOptimizers(OptimizersContainer):
    """torchtitan's optimizers; of the parameter groups, the shared vocabulary gets those that it has parameters for.

    torchtitan itself wants every pattern to match in every part of the model, which is sensible where a part is a stage
    of layers: a pattern for norms would end here.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _build_param_groups(
        model: nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        if isinstance(model, SharedVocabulary):
            chosen = [optimizer_group_of(name, param_group_configs) for name, _ in model.named_parameters()]
            param_group_configs = [group for group in param_group_configs if any(group is other for other in chosen)]
        return OptimizersContainer._build_param_groups(model, param_group_configs, impl_kwargs)


def with_shared_vocabulary(post_optimizer_build_fn: Callable[..., None] | None) -> Callable[..., None]:
    """Wraps a `ModelSpec.post_optimizer_build_fn`, which sees the stages only, as it expects layers in each part."""

    def build(optimizers: OptimizersContainer, model_parts: list[nn.Module], parallel_dims: ParallelDims) -> None:
        for part in model_parts:
            if isinstance(part, SharedVocabulary):
                part.keep_optimizer_state_whole(list(optimizers))
        if post_optimizer_build_fn is not None:
            stages = [part for part in model_parts if not isinstance(part, SharedVocabulary)]
            post_optimizer_build_fn(optimizers, stages, parallel_dims)

    return build
