"""Places launchers in a Ray cluster: creates placement groups and, in each bundle, an actor that
runs a command.

The bundles that a run needs to start form one group, which Ray places as a unit. Each additional
bundle is a separate group, which Ray (and its autoscaler) places when resources are available. When
a machine dies, Ray places its bundles elsewhere and restarts their actors, which run their commands
again."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from shoal_common.errors import DeadlineError

from shoal.ray.command import CommandActor

_THREADS: Final = 2
"""Number of threads per actor: one runs the command, the other responds to requests."""


class Bundles:
    """Bundles of a run, all with the same resources. A context manager that removes the actors,
    their commands and the groups on exit."""

    def __init__(self, what: str, resources: Mapping[str, float], *, strategy: str) -> None:
        """`what`: human-readable purpose of the bundles."""
        self._what = what
        self._resources = dict(resources)
        self._strategy = strategy
        self._groups: list[Any] = []
        self.actors: list[Any] = []

    def place(self, least: int, most: int, *, timeout: timedelta) -> None:
        """Waits until `least` bundles are placed, and requests more, up to `most`. If Ray does not
        place `least` bundles in time, raises a DeadlineError that lists the cluster's resources."""
        group = self._ask_for(least)
        if not group.wait(timeout.total_seconds()):
            raise DeadlineError(
                f"Ray could not place {least} x {_listed(self._resources)} (strategy "
                f"{self._strategy}) within {timeout.total_seconds():g} s (placement_timeout); the "
                f"cluster has {_listed(ray.cluster_resources())}, of which "
                f"{_listed(ray.available_resources())} are free. Request less, or add nodes",
                reason="RESOURCES_UNAVAILABLE",
            )
        for index in range(least):
            self.actors.append(self._actor(group, index))
        for _ in range(most - least):
            self.actors.append(self._actor(self._ask_for(1), 0))

    def _ask_for(self, count: int) -> Any:
        self._groups.append(placement_group([self._resources] * count, strategy=self._strategy))
        return self._groups[-1]

    def _actor(self, group: Any, index: int) -> Any:
        custom = dict(self._resources)
        actor: Any = ray.remote(CommandActor)
        return actor.options(
            num_cpus=custom.pop("CPU", 0),
            num_gpus=custom.pop("GPU", 0),
            memory=custom.pop("memory", None),
            resources=custom,
            max_concurrency=_THREADS,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote(f"{self._what} {len(self.actors)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills running commands and releases the bundles."""
        for actor in self.actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        for group in self._groups:
            with contextlib.suppress(RayError):
                remove_placement_group(group)


def _listed(resources: Mapping[str, float]) -> str:
    shown = {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(("node:", "bundle_")) and "_group_" not in name
    }
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(shown.items())) or "nothing"
