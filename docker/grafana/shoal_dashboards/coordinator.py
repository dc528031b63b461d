"""The coordinator: who is in each job, what it decided, and how quickly."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, quantiles
from shoal_dashboards.rpcs import rpc_graphs

MEMBERSHIP = (
    Graph(
        title="Members by phase",
        text="Joined members replay their script, ready ones wait for a generation, quarantined "
        "ones are kept out.",
        unit="none",
        queries=[("sum by (phase) (shoal_coordinator_members{job}) > 0", "{{phase}}")],
    ),
    Graph(
        title="Machines that are not healthy",
        text="Leaving machines are about to be taken away. Workers on unhealthy and excluded ones "
        "are refused; `shoal status` gives the reason.",
        unit="none",
        queries=[("shoal_coordinator_machines{job} > 0", "{{job_id}} {{condition}}")],
    ),
    Graph(
        title="New generations",
        text="By cause. Failures interrupt the step in flight; borders do not.",
        unit="none",
        queries=[
            (
                "increase(shoal_coordinator_generations_formed_total[$__rate_interval]) > 0",
                "{{cause}}",
            )
        ],
    ),
    Graph(
        title="Phase",
        text="1 for the phase that each job is in: waiting, running, stopping or finished.",
        unit="none",
        queries=[
            ("shoal_coordinator_job_phase{job} == 1", "{{job_id}} {{phase}}"),
        ],
    ),
    Graph(
        title="Runs",
        text="Number of each job's newest run, and the generations that this run has had: its "
        "first says that it trains.",
        unit="none",
        queries=[
            ("shoal_coordinator_run{job}", "{{job_id}} run"),
            ("shoal_coordinator_run_generations{job}", "{{job_id}} generations"),
        ],
    ),
    Graph(
        title="Progress",
        text="Steps a second, as heartbeats tell: also of jobs whose workers Prometheus does not "
        "reach.",
        unit="short",
        queries=[
            (
                "clamp_min(deriv(shoal_coordinator_newest_step{job}[$__rate_interval]), 0)",
                "{{job_id}}",
            ),
        ],
    ),
    Graph(
        title="Batches leased",
        text="Batches a second dealt first come first served to members of asynchronous runs.",
        unit="short",
        queries=[
            ("rate(shoal_coordinator_batches_leased_total[$__rate_interval])", "{{instance}}")
        ],
    ),
    Graph(
        title="Partitions that move",
        text="Moves between parameter servers that were settled, and partitions that have another "
        "server since: servers come, or are "
        "drained. Where moves fail again and again, the job's events say why (move_failed).",
        unit="none",
        queries=[
            (
                "increase(shoal_coordinator_partition_moves_total[$__rate_interval]) > 0",
                "moves: {{outcome}}",
            ),
            (
                "increase(shoal_coordinator_partitions_moved_total[$__rate_interval]) > 0",
                "partitions moved",
            ),
        ],
    ),
)

WORK = (
    Graph(
        title="From a loss to its announcement",
        text="From the moment the coordinator learns of a death until the survivors have been told "
        "of the generation without it.",
        unit="s",
        queries=quantiles("shoal_coordinator_loss_to_announcement_seconds", "instance"),
    ),
    Graph(
        title="Writing a transition",
        text="Time of one commit to Redis, on disk before it is announced. It bounds how fast "
        "membership can change.",
        unit="s",
        queries=quantiles("shoal_coordinator_commit_seconds", "instance"),
    ),
    Graph(
        title="Events in a commit",
        text="Above 1 the group commit is at work. Retries mean that Redis did not answer.",
        unit="none",
        queries=[
            *quantiles("shoal_coordinator_events_per_commit", "instance"),
            (
                "increase(shoal_coordinator_commit_retries_total[$__rate_interval]) > 0",
                "{{instance}} retries",
            ),
        ],
    ),
    Graph(
        title="Redis",
        text="1 while Redis answers the coordinator. At 0 training continues and membership waits.",
        unit="none",
        queries=[("shoal_coordinator_redis_up", "{{instance}}")],
    ),
    Graph(
        title="Sessions",
        text="Open sessions of members and parameter servers.",
        unit="none",
        queries=[("shoal_coordinator_sessions", "{{kind}}")],
    ),
    Graph(
        title="Heartbeats",
        text="Heartbeats a second: the coordinator's steady load.",
        unit="short",
        queries=[("rate(shoal_coordinator_heartbeats_total[$__rate_interval])", "{{kind}}")],
    ),
)


COORDINATOR = Board(
    uid="shoal-coordinator",
    title="Shoal: coordinator",
    text="Membership of jobs, the coordinator's own work, and its RPCs.",
    rows=(
        ("Membership", MEMBERSHIP),
        ("Its own work", WORK),
        ("RPCs", rpc_graphs('job="coordinator"')),
    ),
)
