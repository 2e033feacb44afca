"""What the work of a step costs, in seconds: of a unit on each stage, of the shared vocabulary, and of messages.

A table for slices of some length; a whole microbatch is a unit, too, for schedules that cut none (`whole`).
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from slimpipe.program.cost import AttentionShape
from slimpipe.program.ir import Unit


def _is_cost(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction between two ranks."""

    latency: float = 0.0
    """Seconds of a message without content."""
    bandwidth: float = math.inf
    """Bytes per second."""

    def __post_init__(self) -> None:
        if not _is_cost(self.latency):
            raise ValueError(f"link.latency = {self.latency}: it must be at least 0 and finite; nearest legal value: 0")
        if not isinstance(self.bandwidth, int | float) or not self.bandwidth > 0:
            raise ValueError(f"link.bandwidth = {self.bandwidth}: it must be above 0 bytes per second")

    def seconds(self, num_bytes: float) -> float:
        """For a message to arrive."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class OpCosts:
    """Seconds of everything a rank is told to do. Tuples have one entry for each global stage.

    The attention of slice i is on ``slice_len * (i + 1/2)`` keys for each of its ``slice_len`` queries: its pairs.
    """

    slice_len: int
    """Tokens of a unit."""
    linear_forward: tuple[float, ...]
    """Of a unit without its attention and without the output layer; the embedding included unless it is shared."""
    linear_backward: tuple[float, ...]
    attention_forward: tuple[float, ...]
    """Per query-key pair of a unit, in all attention layers of the stage together."""
    attention_backward: tuple[float, ...]
    recompute_forward: tuple[float, ...] = ()
    """Of a unit, before its backward; () for none. Attention that is recomputed is in it, if any."""
    head_forward: float = 0.0
    """Output layer and loss of a unit, on the last stage unless shared."""
    head_backward: float = 0.0
    vocabulary: float = 0.0
    """If shared: a rank's part of output layer and loss of a unit, gradients included."""
    vocabulary_forward: float = 0.0
    """The same without gradients, in a forward-only program."""
    embed: float = 0.0
    """If shared: a rank's part of a unit's embedding."""
    embed_backward: float = 0.0
    layers: tuple[int, ...] = ()
    """Attention layers of each stage, which work of the exchange is spread over; () for one each."""
    host_seconds: float = 0.0
    """Per instruction: what the host does around it."""
    alone_speed: float = 1.0
    """How many times as fast a rank computes while all others wait; all other figures are of busy ranks. 1 where each
    has hardware of its own, up to 2 where two ranks share a core."""
    link: Link = Link()
    activation_bytes: int = 0
    """Of a unit's message from stage to stage, in either direction, and to or from all ranks that share the
    vocabulary."""
    attention_shape: AttentionShape | None = None
    """What the messages of the exchange are made of; None: they are empty."""

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if field.name in ("link", "attention_shape"):
                continue
            if isinstance(values, tuple) != str(field.type).startswith("tuple"):
                raise ValueError(f"{field.name} = {values}: it must be of type {field.type}")
            optional = field.name in ("recompute_forward", "layers") and values == ()
            if isinstance(values, tuple) and len(values) != self.num_stages and not optional:
                raise ValueError(
                    f"{field.name} has {len(values)} entries: it must have one for each of the {self.num_stages} "
                    "stages, as linear_forward has"
                )
            for value in values if isinstance(values, tuple) else (values,):
                if not _is_cost(value):
                    raise ValueError(
                        f"{field.name} = {values}: costs must be at least 0 and finite; nearest legal value: 0"
                    )
        if type(self.slice_len) is not int or self.slice_len < 1:
            raise ValueError(f"slice_len = {self.slice_len}: it must be an integer of at least 1")
        if self.alone_speed < 1:
            raise ValueError(f"alone_speed = {self.alone_speed}: it must be at least 1; nearest legal value: 1")

    @property
    def num_stages(self) -> int:
        """Global stages."""
        return len(self.linear_forward)

    def num_layers(self, stage: int) -> int:
        """Attention layers of a stage, at least one."""
        return max(1, self.layers[stage]) if self.layers else 1

    def pairs(self, slice_index: int) -> float:
        """Query-key pairs of a unit in one layer: all past tokens and half the own slice for every query."""
        return self.slice_len * (slice_index + 0.5) * self.slice_len

    def forward_seconds(self, unit: Unit, *, vocab_parallel: str = "none") -> float:
        """Of a whole unit, without messages and host."""
        head = self.head_forward if vocab_parallel == "none" and unit.stage == self.num_stages - 1 else 0.0
        return self.linear_forward[unit.stage] + self.attention_forward[unit.stage] * self.pairs(unit.slice) + head

    def backward_seconds(self, unit: Unit, *, vocab_parallel: str = "none") -> float:
        """Of a whole unit, recomputing included."""
        head = self.head_backward if vocab_parallel == "none" and unit.stage == self.num_stages - 1 else 0.0
        again = self.recompute_forward[unit.stage] if self.recompute_forward else 0.0
        attention = self.attention_backward[unit.stage] * self.pairs(unit.slice)
        return self.linear_backward[unit.stage] + attention + head + again

    def whole(self, num_slices: int) -> OpCosts:
        """Costs where a unit is a whole microbatch of ``num_slices`` of these slices; not for recomputed attention,
        which is counted as linear work."""

        def times(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
            return tuple(num_slices * x for x in value) if isinstance(value, tuple) else num_slices * value

        scaled = {name: times(getattr(self, name)) for name in _PER_UNIT}
        shape = self.attention_shape
        return replace(
            self,
            **scaled,  # type: ignore[arg-type]
            attention_shape=None if shape is None else replace(shape, slice_len=num_slices * shape.slice_len),
        )

    @classmethod
    def units(
        cls,
        num_stages: int,
        *,
        num_slices: int = 1,
        attention_share: float = 0.0,
        backward_to_forward: float = 2.0,
        slice_len: int = 1,
        **others: object,
    ) -> OpCosts:
        """For a look at a schedule: a mean unit takes 1 / num_stages forward, messages nothing.

        Args:
            num_stages: Global stages.
            num_slices: Slices per microbatch.
            attention_share: Share of attention in a microbatch's time, either way.
            backward_to_forward: How many times as long backward takes.
            slice_len: Tokens of a unit.
            others: Any other field.
        """
        mean_pairs = slice_len * slice_len * num_slices / 2
        linear, attention = (1 - attention_share) / num_stages, attention_share / num_stages / mean_pairs
        forward = {"linear_forward": (linear,) * num_stages, "attention_forward": (attention,) * num_stages}
        backward = {
            name.replace("forward", "backward"): tuple(backward_to_forward * x for x in values)
            for name, values in forward.items()
        }
        return cls(slice_len=slice_len, **{**forward, **backward, **others})  # type: ignore[arg-type]

    def to_json(self) -> str:
        """As text; `from_json` reads it. A link without limit has no bandwidth there, since JSON has no infinity."""
        values = asdict(self)
        if self.link.bandwidth == math.inf:
            values["link"]["bandwidth"] = None
        return json.dumps(values, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> OpCosts:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The text is no table of costs; the message says what is wrong.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            values = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
            link, shape = values.pop("link", {}), values.pop("attention_shape", None)
            if link.get("bandwidth") is None:
                link = {**link, "bandwidth": math.inf}
            if shape is not None and any(type(size) is not int or size < 1 for size in shape.values()):
                raise ValueError(f"attention_shape = {shape}: sizes must be integers of at least 1")
            return cls(**values, link=Link(**link), attention_shape=None if shape is None else AttentionShape(**shape))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"not a table of costs ({type(error).__name__}: {error})") from error


_PER_UNIT = (
    "slice_len",
    "linear_forward",
    "linear_backward",
    "recompute_forward",
    "head_forward",
    "head_backward",
    "vocabulary",
    "vocabulary_forward",
    "embed",
    "embed_backward",
    "activation_bytes",
)
"""Fields that grow with the tokens of a unit; attention is counted in pairs."""
