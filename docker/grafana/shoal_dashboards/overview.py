"""Overview of whether all is well: what an operator opens first, and what says on which dashboard
to go on."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, Listing, Number

NOW = (
    Number(
        title="Alerts",
        text="Alerts that fire now: the list below names them.",
        unit="none",
        queries=[
            ('sum(ALERTS{alertstate="firing"}) or vector(0)', "firing"),
        ],
        bad_above=1,
    ),
    Number(
        title="Ranks",
        text="Ranks that train now, of all chosen jobs.",
        unit="none",
        queries=[
            ("sum(shoal_coordinator_world_size{job})", "ranks"),
        ],
    ),
    Number(
        title="Parameter servers",
        text="Parameter servers that are alive.",
        unit="none",
        queries=[
            ("sum(shoal_coordinator_servers_alive{job})", "servers"),
        ],
    ),
    Number(
        title="Step",
        text="The newest step that each job has committed.",
        unit="none",
        queries=[
            ("shoal_coordinator_newest_step{job}", "{{job_id}}"),
        ],
    ),
    Number(
        title="Without progress",
        text="Seconds since a rank last came to another step, border or operation. Seconds are a "
        "long step; minutes: it stands.",
        unit="s",
        queries=[
            ("shoal_coordinator_seconds_without_progress{job}", "{{job_id}}"),
        ],
        bad_above=60,
    ),
    Number(
        title="Runs that failed",
        text="Jobs whose newest run has failed. `shoal status` says why.",
        unit="none",
        queries=[
            ("count(shoal_coordinator_run_failed_timestamp_seconds{job}) or vector(0)", "failed"),
        ],
        bad_above=1,
    ),
)

LISTS = (
    Listing(
        title="Alerts that fire",
        text="Each with its job and place; docs/observability.md says what to do.",
        unit="none",
        queries=[
            ('ALERTS{alertstate="firing"}', ""),
        ],
        hidden=("Value", "alertstate"),
    ),
    Listing(
        title="Phases of jobs",
        text="Which phase each job is in, which run that is, and how many ranks it takes at least "
        "and at most.",
        unit="none",
        queries=[
            ("shoal_coordinator_job_phase{job} == 1", ""),
        ],
        hidden=("Value", "instance", "job"),
    ),
)

OVER_TIME = (
    Graph(
        title="Samples a second",
        text="Samples that committed steps counted: the useful work. A dip is a fault; a lower "
        "level after it is capacity lost.",
        unit="short",
        queries=[("sum(rate(shoal_worker_samples_total{job}[$__rate_interval]))", "all workers")],
    ),
    Graph(
        title="Mean loss",
        text="The mean of what the ranks last told, per job. A rank's own is on the workers' "
        "dashboard.",
        unit="short",
        queries=[
            ("avg by (job_id) (shoal_worker_loss{job})", "{{job_id}}"),
        ],
    ),
    Graph(
        title="World size",
        text="Ranks that train now, and parameter servers that are alive. 0 ranks: the job waits "
        "for its fewest workers.",
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
        text="Number of each job's newest generation. Each step up is a join, a departure or a "
        "failure.",
        unit="none",
        queries=[("shoal_coordinator_generation{job}", "{{job_id}}")],
    ),
    Graph(
        title="Departures",
        text="How members went, leases that ended without a heartbeat, and failed collectives that "
        "no newer generation explained.",
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
                "unexplained collective failures",
            ),
        ],
    ),
    Graph(
        title="Steps that stand, and stragglers",
        text="Jobs in which ranks have waited for ten seconds, and ranks that hold the others "
        "back. `shoal status` and the logs name them.",
        unit="none",
        queries=[
            ("shoal_coordinator_step_stands{job}", "{{job_id}} stands"),
            ("shoal_coordinator_stragglers{job}", "{{job_id}} stragglers"),
        ],
    ),
    Graph(
        title="Servers without a primary or a backup",
        text="Places of parameter servers that nobody serves, so that pushes and pulls wait; and "
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
        text="Age of each job's newest checkpoint, as its workers wrote it.",
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
    text="Whether all is well, over all services. The other dashboards go into each.",
    rows=(
        ("Now", NOW),
        ("What fires, and where jobs stand", LISTS),
        ("Over time", OVER_TIME),
    ),
)
