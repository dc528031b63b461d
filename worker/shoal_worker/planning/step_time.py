"""Estimates a step's time from the number of operations, a device's speed, the bytes sent and a
link's speed. Accounts for the overlap of computation and communication.

    computing      operations / (device_flops x efficiency); for a pipeline, the simulated time of
                   its schedule
    forward pass   overlaps with the gathering of its parameters
    backward pass  overlaps with the gathering of its parameters and the reduction of gradients
    alone          sums of activations between split layers, and messages after the passes, add to
                   the time

Not included: the optimizer's own time, data loading, and contention for shared switches. The
estimate is meant for comparing strategies; it does not predict the time of a real step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal_worker.planning.costs import Traffic, When
from shoal_worker.planning.pipeline_time import play
from shoal_worker.planning.shares import Costs
from shoal_worker.planning.traced_passes import Passes


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Speeds that are assumed for estimating a step's time."""

    device_flops: float = 312e12
    """Peak operations per second of a rank's device. Default: an A100 in bfloat16."""
    efficiency: float = 0.4
    """Fraction of `device_flops` that training reaches."""
    bandwidth: float = 12.5e9
    """Bytes per second that a rank sends to other hosts. Default: 100 Gbit/s for each rank."""
    local_bandwidth: float = 150e9
    """Bytes per second that a rank sends to other ranks on its host."""
    latency: float = 20e-6
    """Minimum duration of a micro-batch in a stage, and of a collective, in seconds. For a
    collective, it is multiplied by the logarithm of the number of ranks."""
    ranks_per_host: int = 8

    def seconds(self, traffic: Traffic) -> float:
        """Returns how many seconds it takes to send `traffic` if nothing else is sent."""
        return traffic.sent / self._speed(
            traffic.group
        ) + traffic.messages * self.latency * math.log2(max(2, traffic.group))

    def _speed(self, group: int) -> float:
        return self.local_bandwidth if group <= self.ranks_per_host else self.bandwidth

    @property
    def flops(self) -> float:
        """Operations per second that training is assumed to reach."""
        return self.device_flops * self.efficiency

    def border_speed(self, group: int) -> float:
        """Returns the bandwidth between adjacent pipeline stages, in bytes per second. `group`:
        number of ranks in a replica; if it exceeds a host, stages are assumed to be on different
        hosts."""
        return self._speed(group)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated duration of a step."""

    seconds: float
    computing: float
    """Seconds of computation, including the pipeline's bubble."""
    bubble: float
    """Average fraction of the pipeline's time that its ranks spend waiting; 0 without a
    pipeline."""


def estimate(
    costs: Costs,
    passes: Passes,
    assumptions: Assumptions,
    *,
    samples: float,
    tensor: int,
    replica_size: int,
) -> Estimate:
    """Estimates the duration of a step. `samples`: number of samples that a replica processes."""
    bubble = 0.0
    if costs.schedule is not None and costs.stages is not None:
        speed = assumptions.border_speed(replica_size)
        computing, bubble = play(
            costs.schedule,
            costs.stages,
            flops_per_second=assumptions.flops,
            bytes_per_second=speed,
            latency=assumptions.latency,
        )
        forward = backward = 0.0
    else:
        each = samples / passes.samples / tensor / assumptions.flops
        forward, backward = (
            passes.forward_flops * each,
            (passes.flops - passes.forward_flops) * each,
        )
        computing = forward + backward
    took = {
        when: sum(assumptions.seconds(one) for one in costs.traffic if one.when is when)
        for when in When
    }
    shown = (
        took[When.ALONE]
        + max(0.0, took[When.FORWARD] - forward)
        + max(0.0, took[When.BACKWARD] - backward)
    )
    return Estimate(seconds=computing + shown, computing=computing, bubble=bubble)
