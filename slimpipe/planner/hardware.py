"""GPUs: what they can do, and the share of it that we count on. Not measured by this project: see docs/planner.md."""

from __future__ import annotations

from dataclasses import dataclass

from slimpipe.nearest import nearest_name
from slimpipe.planner.costs import Link


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One GPU and its links. Rates are per GPU and, of links, per direction."""

    name: str
    memory: float
    """Bytes."""
    peak_flops: float
    """Dense bf16 FLOP per second, as MFU counts it."""
    memory_bandwidth: float
    """Bytes per second."""
    node_link: Link
    """Between two GPUs of a node."""
    network_link: Link
    """Between two GPUs of different nodes."""
    gpus_per_node: int = 8
    matrix_efficiency: float = 0.70
    """Share of the peak that matrix products reach."""
    attention_efficiency: float = 0.60
    """Share of the peak that attention reaches forward."""
    attention_backward_efficiency: float = 0.50
    host_seconds: float = 20e-6
    """Per instruction."""

    def link(self, num_gpus: int) -> Link:
        """Between pipeline neighbours of a run: torchtitan puts them as far apart as they can be."""
        return self.node_link if num_gpus <= self.gpus_per_node else self.network_link


_NETWORK = Link(latency=15e-6, bandwidth=45e9)

HARDWARE = {
    item.name: item
    for item in (
        Hardware(
            name="a100",
            memory=80 * 2**30,
            peak_flops=312e12,
            memory_bandwidth=2.0e12,
            node_link=Link(latency=8e-6, bandwidth=250e9),
            network_link=Link(latency=15e-6, bandwidth=22e9),
        ),
        Hardware(
            name="h100",
            memory=80 * 2**30,
            peak_flops=989e12,
            memory_bandwidth=3.35e12,
            node_link=Link(latency=8e-6, bandwidth=380e9),
            network_link=_NETWORK,
        ),
        Hardware(
            name="h200",
            memory=141e9,
            peak_flops=989e12,
            memory_bandwidth=4.8e12,
            node_link=Link(latency=8e-6, bandwidth=380e9),
            network_link=_NETWORK,
        ),
    )
}


def hardware_named(name: str) -> Hardware:
    """A GPU by its name.

    Raises:
        ValueError: no such GPU; the message gives the nearest name and all of them.
    """
    if name.lower() in HARDWARE:
        return HARDWARE[name.lower()]
    near = nearest_name(name.lower(), HARDWARE)
    raise ValueError(f'--gpu: no GPU "{name}"; nearest: "{near}"; known: {", ".join(HARDWARE)}')
