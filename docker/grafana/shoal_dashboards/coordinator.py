"""The coordinator: the members of each job, the generations it has formed, and how long that
took."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, quantiles
from shoal_dashboards.rpcs import rpc_graphs

MEMBERSHIP = (
    Graph(
        title="Members by phase",
        text="Joined members replay their script, ready members wait for a generation, and "
        "quarantined members are excluded for a while.",
        unit="none",
        queries=[("sum by (phase) (shoal_coordinator_members{job}) > 0", "{{phase}}")],
    ),
    Graph(
        title="Machines that are not healthy",
        text="Leaving machines are about to be taken away. Workers on unhealthy and excluded "
        "machines are refused; `shoal status` gives the reason.",
        unit="none",
        queries=[("shoal_coordinator_machines{job} > 0", "{{job_id}} {{condition}}")],
    ),
    Graph(
        title="New generations",
        text="New generations by cause. A failure interrupts the current step; a join or drain "
        "(border) takes effect at a step boundary.",
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
        text="The current phase of each job has the value 1: waiting, running, stopping or "
        "finished.",
        unit="none",
        queries=[
            ("shoal_coordinator_job_phase{job} == 1", "{{job_id}} {{phase}}"),
        ],
    ),
    Graph(
        title="Runs",
        text="Number of each job's newest run, and the number of generations in this run, which "
        "is at least 1 once it trains.",
        unit="none",
        queries=[
            ("shoal_coordinator_run{job}", "{{job_id}} run"),
            ("shoal_coordinator_run_generations{job}", "{{job_id}} generations"),
        ],
    ),
    Graph(
        title="Progress",
        text="Steps per second according to heartbeats, which also covers jobs whose workers "
        "Prometheus cannot reach.",
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
        text="Batches per second that were leased to members of asynchronous runs.",
        unit="short",
        queries=[
            ("rate(shoal_coordinator_batches_leased_total[$__rate_interval])", "{{instance}}")
        ],
    ),
    Graph(
        title="Partitions that move",
        text="Completed moves between parameter servers, and the partitions that were moved, "
        "because servers join or are drained. If moves fail again and again, the job's events "
        "show the reason (move_failed).",
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
        text="Time from the coordinator's detection of a death until the survivors were informed "
        "of the generation without that member.",
        unit="s",
        queries=quantiles("shoal_coordinator_loss_to_announcement_seconds", "instance"),
    ),
    Graph(
        title="Writing a transition",
        text="Time of one commit to Redis, which must be on disk before the change is announced. "
        "It limits how fast membership can change.",
        unit="s",
        queries=quantiles("shoal_coordinator_commit_seconds", "instance"),
    ),
    Graph(
        title="Events in a commit",
        text="Above 1, several events were committed together. Retries mean that Redis did not "
        "answer.",
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
        text="1 while Redis answers the coordinator. At 0, training continues, but membership "
        "changes wait.",
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
        text="Heartbeats per second, which are the coordinator's constant load.",
        unit="short",
        queries=[("rate(shoal_coordinator_heartbeats_total[$__rate_interval])", "{{kind}}")],
    ),
)


COORDINATOR = Board(
    uid="shoal-coordinator",
    title="Shoal: coordinator",
    text="Membership of jobs, the work of the coordinator, and its RPCs.",
    rows=(
        ("Membership", MEMBERSHIP),
        ("Work of the coordinator", WORK),
        ("RPCs", rpc_graphs('job="coordinator"')),
    ),
)
