"""The overview, which an operator opens first. It shows whether all services work, and which
dashboard has the details."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, Listing, Number

NOW = (
    Number(
        title="Alerts",
        text="Number of alerts that are firing; the list below names them.",
        unit="none",
        queries=[
            ('sum(ALERTS{alertstate="firing"}) or vector(0)', "firing"),
        ],
        bad_above=1,
    ),
    Number(
        title="Ranks",
        text="Number of ranks that are training, over all selected jobs.",
        unit="none",
        queries=[
            ("sum(shoal_coordinator_world_size{job})", "ranks"),
        ],
    ),
    Number(
        title="Parameter servers",
        text="Number of parameter servers that are alive.",
        unit="none",
        queries=[
            ("sum(shoal_coordinator_servers_alive{job})", "servers"),
        ],
    ),
    Number(
        title="Step",
        text="Newest committed step of each job.",
        unit="none",
        queries=[
            ("shoal_coordinator_newest_step{job}", "{{job_id}}"),
        ],
    ),
    Number(
        title="Without progress",
        text="Seconds since any rank last reached another step, step boundary or operation. Some "
        "seconds may be a long step; after minutes, the job has probably stalled.",
        unit="s",
        queries=[
            ("shoal_coordinator_seconds_without_progress{job}", "{{job_id}}"),
        ],
        bad_above=60,
    ),
    Number(
        title="Runs that failed",
        text="Jobs whose newest run has failed. `shoal status` shows the reason.",
        unit="none",
        queries=[
            ("count(shoal_coordinator_run_failed_timestamp_seconds{job}) or vector(0)", "failed"),
        ],
        bad_above=1,
    ),
)

LISTS = (
    Listing(
        title="Firing alerts",
        text="Each alert with its job and instance. docs/observability.md has the remedies.",
        unit="none",
        queries=[
            ('ALERTS{alertstate="firing"}', ""),
        ],
        hidden=("Value", "alertstate"),
    ),
    Listing(
        title="Phases of jobs",
        text="The phase of each job, the number of its run, and its minimum and maximum number of "
        "ranks.",
        unit="none",
        queries=[
            ("shoal_coordinator_job_phase{job} == 1", ""),
        ],
        hidden=("Value", "instance", "job"),
    ),
)

OVER_TIME = (
    Graph(
        title="Samples per second",
        text="Samples in committed steps. A dip is a fault; a lower level after it means that "
        "fewer workers are training.",
        unit="short",
        queries=[("sum(rate(shoal_worker_samples_total{job}[$__rate_interval]))", "all workers")],
    ),
    Graph(
        title="Mean loss",
        text="Mean of the losses that the ranks reported last, per job. The dashboard of workers "
        "shows the loss of each rank.",
        unit="short",
        queries=[
            ("avg by (job_id) (shoal_worker_loss{job})", "{{job_id}}"),
        ],
    ),
    Graph(
        title="World size",
        text="Ranks that are training, and parameter servers that are alive. With 0 ranks, the "
        "job waits until it has its minimum number of workers.",
        unit="none",
        queries=[
            ("shoal_coordinator_world_size{job}", "{{job_id}} ranks"),
            ("shoal_coordinator_min_workers{job}", "{{job_id}} at least"),
            ("shoal_coordinator_max_workers{job}", "{{job_id}} at most"),
            ("shoal_coordinator_servers_alive{job}", "{{job_id}} parameter servers"),
        ],
    ),
    Graph(
        title="Generation",
        text="Number of each job's newest generation. Each increase is a join, a departure or a "
        "failure.",
        unit="none",
        queries=[("shoal_coordinator_generation{job}", "{{job_id}}")],
    ),
    Graph(
        title="Departures",
        text="Members that left, by reason; leases that expired without a heartbeat; and failed "
        "collectives that were not explained by a newer generation.",
        unit="none",
        queries=[
            (
                "increase(shoal_coordinator_members_departed_total[$__rate_interval]) > 0",
                "{{ending}}",
            ),
            (
                "increase(shoal_coordinator_leases_expired_total[$__rate_interval]) > 0",
                "lease of a {{kind}}",
            ),
            (
                "increase(shoal_coordinator_collective_failures_total[$__rate_interval]) > 0",
                "unexplained failures of collectives",
            ),
        ],
    ),
    Graph(
        title="Stalled steps and stragglers",
        text="Jobs in which ranks have been waiting for at least ten seconds, and ranks that "
        "delay the others. `shoal status` and the logs name the ranks.",
        unit="none",
        queries=[
            ("shoal_coordinator_step_stands{job}", "{{job_id}} stalled"),
            ("shoal_coordinator_stragglers{job}", "{{job_id}} stragglers"),
        ],
    ),
    Graph(
        title="Servers without a primary or a backup",
        text="Number of parameter servers that are missing, so that pushes and pulls wait, and of "
        "those without a backup in sync.",
        unit="none",
        queries=[
            ("shoal_coordinator_server_places_unserved{job}", "{{job_id}} unserved"),
            (
                "shoal_coordinator_server_places_unprotected{job}",
                "{{job_id}} without a backup in sync",
            ),
        ],
    ),
    Graph(
        title="Checkpoints",
        text="Age of each job's newest checkpoint.",
        unit="s",
        queries=[
            (
                "time() - max by (job_id) (shoal_worker_checkpoint_timestamp_seconds{job} > 0)",
                "{{job_id}}",
            ),
        ],
    ),
)

OVERVIEW = Board(
    uid="shoal",
    title="Shoal: overview",
    text="State of all services. The other dashboards have the details.",
    rows=(
        ("Now", NOW),
        ("Alerts and jobs", LISTS),
        ("Over time", OVER_TIME),
    ),
)
