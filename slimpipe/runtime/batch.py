"""One step's microbatches, checked and cut into equal slices along the sequence.

Shapes: B batch, S sequence, L slice. Which dim holds the sequence is the option ``seq_dim``.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch

from slimpipe.attention.mask import Documents
from slimpipe.options import SlimPipeOptions
from slimpipe.runtime.microbatches import Microbatches


class Batch:
    """The arguments of one step, by microbatch and slice.

    A rank may be given no tensor at all (middle ranks): ``seq_len`` is then None until `set_seq_len` tells it.

    Raises:
        TypeError: A tensor is missing or of the wrong kind.
        ValueError: Tensors of unequal sequence length, one that does not divide into slices, mask objects, or a keyword
            tensor of sequence length that nobody said how to cut.
    """

    def __init__(
        self,
        microbatches: Microbatches,
        *,
        num_slices: int,
        options: SlimPipeOptions,
    ) -> None:
        self._args = microbatches.args
        self._targets = microbatches.targets
        self._num_slices = num_slices
        self.seq_dim = options.seq_dim
        self._options = options
        self._kwargs = [self._checked_kwargs(kwargs) for kwargs in microbatches.kwargs]
        self.seq_len: int | None = None
        self._shape: tuple[int, ...] = ()
        self._find_seq_len()
        given = ["positions" in kwargs for kwargs in self._kwargs]
        if any(given) and not all(given):
            raise ValueError(f"positions are given for some microbatches only ({given}); give them for all or for none")
        self.has_positions = any(given)
        self.documents: list[Documents] = [] if self.seq_len is None else self._documents()
        """Where each microbatch's documents start."""

    @property
    def slice_len(self) -> int:
        """Tokens per slice."""
        assert self.seq_len is not None
        return self.seq_len // self._num_slices

    def set_seq_len(self, seq_len: int) -> None:
        """Tell the sequence length to a rank that was given no tensor."""
        if self.seq_len is None:
            self.seq_len = seq_len
            self.documents = self._documents()

    @property
    def num_tokens(self) -> int:
        """Tokens of one microbatch."""
        return math.prod(self._shape)

    @property
    def documents_hash(self) -> int:
        """A number that differs where ranks were given different positions, by all likelihood; 0 without positions."""
        starts = ((row, start) for documents in self.documents for row in documents.starts for start in row)
        return hash(tuple(starts)) & (2**62 - 1) if self.has_positions else 0

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor that the caller gave."""
        values = [*chain(*self._args), *chain(*(kwargs.values() for kwargs in self._kwargs)), *(self._targets or [])]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def default_positions(self, slice_: int, *, like: torch.Tensor) -> torch.Tensor:
        """Positions of a slice where the caller gave none: one document per row, counted from the sequence's start."""
        start = slice_ * self.slice_len
        positions = torch.arange(start, start + self.slice_len, device=like.device)
        return positions.expand(*like.shape[: self.seq_dim], self.slice_len)

    def args(self, microbatch: int, slice_: int) -> tuple:
        """Positional arguments of the first stage for one unit."""
        return tuple(self._cut(value, slice_) for value in self._args[microbatch])

    def kwargs(self, microbatch: int, slice_: int) -> dict[str, Any]:
        """Keyword arguments of a stage for one unit."""
        sliced = self._options.sliced_kwargs
        return {
            name: self._cut(value, slice_) if name in sliced else value
            for name, value in self._kwargs[microbatch].items()
        }

    def target(self, microbatch: int, slice_: int) -> torch.Tensor:
        """Labels of one unit."""
        assert self._targets is not None
        return self._cut(self._targets[microbatch], slice_)

    def share(self, *, tokens: list[torch.Tensor] | None, targets: list[torch.Tensor] | None) -> None:
        """Take over tokens and labels per microbatch that another rank was given; None to leave what is."""
        if tokens is not None:
            self._args = [(microbatch,) for microbatch in tokens]
        if targets is not None:
            self._targets = targets

    def check_ids(self) -> None:
        """Raise unless the first stage, on this rank, is given token ids and nothing else.

        Raises:
            ValueError: It is given other tensors.
        """
        for microbatch in self._args:
            if len(microbatch) > 1 or any(value.dtype not in (torch.int64, torch.int32) for value in microbatch):
                given = [f"{tuple(value.shape)} {value.dtype}" for value in microbatch]
                raise ValueError(
                    f"the first stage was given {given}: with a VocabularyEmbedding it must be given token ids only, "
                    "one tensor of dtype torch.int64 or torch.int32"
                )
        _check_alike("tokens", self.tokens)

    def check_labels(self) -> None:
        """Raise unless the labels, on a rank that is given any, are integers, of one shape for all microbatches.

        Raises:
            TypeError: They are no integers.
            ValueError: They have several shapes.
        """
        for index, value in enumerate(self.targets):
            if value.dtype not in (torch.int64, torch.int32):
                raise TypeError(
                    f"labels of microbatch {index} have dtype {value.dtype}: with a VocabularyHead they must be "
                    "torch.int64 or torch.int32"
                )
        _check_alike("labels", self.targets)

    @property
    def tokens(self) -> list[torch.Tensor]:
        """The tokens of each microbatch; empty on a rank that was given none."""
        return [microbatch[0] for microbatch in self._args if microbatch]

    @property
    def targets(self) -> list[torch.Tensor]:
        """The labels of each microbatch; empty on a rank that was given none."""
        return self._targets or []

    def _cut(self, value: Any, slice_: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.narrow(self.seq_dim, slice_ * self.slice_len, self.slice_len)

    def _checked_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        masks = kwargs.get("attention_masks")
        if masks is not None:
            raise ValueError(
                f"attention_masks = {type(masks).__name__}: a slimpipe schedule makes its own masks and takes none; "
                "pass `positions` that restart at 0 at each document instead, or attention_masks=None"
            )
        return {name: value for name, value in kwargs.items() if name != "attention_masks" and value is not None}

    def _find_seq_len(self) -> None:
        sized: list[tuple[str, torch.Tensor]] = []
        for index, args in enumerate(self._args):
            sized += [(f"argument {i} of microbatch {index}", value) for i, value in enumerate(args)]
        for index, kwargs in enumerate(self._kwargs):
            sized += [
                (f"{name} of microbatch {index}", value)
                for name, value in kwargs.items()
                if name in self._options.sliced_kwargs
            ]
        if self._targets is not None:
            sized += [(f"target of microbatch {index}", value) for index, value in enumerate(self._targets)]
        for name, value in sized:
            self._check_sized(name, value)
        self._refuse_uncut_kwargs()

    def _check_sized(self, name: str, value: Any) -> None:
        dim = self.seq_dim
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(value).__name__}; a slimpipe schedule cuts it into slices and needs a tensor"
            )
        if value.dim() <= dim:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: no dim {dim} (option seq_dim) to cut into slices")
        size = value.shape[dim]
        if self.seq_len is None:
            self.seq_len, self._shape = size, tuple(value.shape[: dim + 1])
        if tuple(value.shape[: dim + 1]) != self._shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, others begin with {self._shape}; tokens, labels and positions "
                f"of all microbatches of a step must agree up to dim {dim} (option seq_dim)"
            )
        if size % self._num_slices or not size:
            nearest = max(1, round(size / self._num_slices)) * self._num_slices
            raise ValueError(
                f"sequence length {size} ({name}) does not divide into num_slices = {self._num_slices} equal slices; "
                f"nearest sequence length that does: {nearest}"
            )

    def _refuse_uncut_kwargs(self) -> None:
        if self.seq_len is None or self._num_slices == 1:
            return
        for kwargs in self._kwargs:
            for name, value in kwargs.items():
                if name in self._options.sliced_kwargs or not isinstance(value, torch.Tensor):
                    continue
                if self.seq_len in value.shape:
                    raise ValueError(
                        f"keyword argument {name} has shape {tuple(value.shape)}, which holds the sequence length "
                        f"{self.seq_len}: name it in SlimPipeOptions.sliced_kwargs = {self._options.sliced_kwargs} to "
                        "have it cut along seq_dim; attention masks are not taken at all"
                    )

    def _documents(self) -> list[Documents]:
        rows = [kwargs.get("positions") for kwargs in self._kwargs]
        rows_BS = [None if x is None else x.movedim(self.seq_dim, -1).reshape(-1, self.seq_len) for x in rows]
        return [Documents.from_positions(positions_BS, slice_len=self.slice_len) for positions_BS in rows_BS]


def _check_alike(name: str, values: list[torch.Tensor]) -> None:
    """Raise unless all microbatches have one shape; those of one step are broadcast together."""
    shapes = [tuple(value.shape) for value in values]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"{name} of the microbatches have shapes {shapes}; with a shared vocabulary they must be equal"
        )
