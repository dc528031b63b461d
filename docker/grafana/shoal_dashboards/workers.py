"""The workers: what they train, what a fault costs them, what they save."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, Listing, quantiles

TRAINING = (
    Graph(
        title="Loss",
        text="The loss of each worker's last committed step, where the loop tells it.",
        unit="short",
        queries=[("shoal_worker_loss{job}", "{{instance}}")],
    ),
    Graph(
        title="Step time",
        text="From one commit to the next. The 99th percentile far above the median: stragglers, "
        "or faults.",
        unit="s",
        queries=quantiles("shoal_worker_step_seconds", "job_id"),
    ),
    Graph(
        title="Waiting for peers",
        text="Seconds of each second that a rank waits in collectives. One far below the others "
        "holds them back; all high: the network.",
        unit="percentunit",
        queries=[("rate(shoal_worker_wait_seconds_total{job}[$__rate_interval])", "{{instance}}")],
    ),
    Graph(
        title="Share of a step's micro-batches",
        text="Micro-batches of each rank in a step relative to an equal part, while they are dealt "
        "by speed; 0 while they are dealt evenly.",
        unit="short",
        queries=[("shoal_worker_step_share{job}", "{{instance}}")],
    ),
    Graph(
        title="Steps",
        text="Steps a second that each worker committed, and that a fault aborted. Committed, "
        "all lines of one job lie together.",
        unit="short",
        queries=[
            (
                "rate(shoal_worker_steps_committed_total{job}[$__rate_interval])",
                "{{instance}} committed",
            ),
            ("rate(shoal_worker_steps_lost_total{job}[$__rate_interval]) > 0", "{{instance}} lost"),
        ],
    ),
    Graph(
        title="World size and generation",
        text="Ranks in the generation that each worker works in. Workers that differ for longer "
        "than a step are being evicted.",
        unit="none",
        queries=[
            ("shoal_worker_world_size{job}", "{{instance}} world size"),
            ("shoal_worker_generation{job}", "{{instance}} generation"),
        ],
    ),
    Graph(
        title="Rank",
        text="Which worker has which rank, and when that changed.",
        unit="none",
        queries=[("shoal_worker_rank{job}", "{{instance}}")],
    ),
    Listing(
        title="Who has which rank",
        text="The member and the rank of each place now. Series are named by places, which stay "
        "when ranks are dealt anew.",
        unit="none",
        queries=[
            ("shoal_worker_info{job}", ""),
        ],
        hidden=("Value", "job", "role", "slot", "host"),
    ),
)

PAUSES = (
    Graph(
        title="Pause at a failure",
        text="From noticing a failure to the next committed step, as the slowest survivor saw it.",
        unit="s",
        queries=quantiles("shoal_worker_recovery_seconds", "job_id"),
    ),
    Graph(
        title="Pause at a join",
        text="Pause of the other ranks at a step boundary, until joiners had the state.",
        unit="s",
        queries=quantiles("shoal_worker_join_seconds", "job_id"),
    ),
    Graph(
        title="Forming a generation",
        text="To connect the new process group and reconcile state in it: the part of a pause that "
        "is not detection.",
        unit="s",
        queries=quantiles("shoal_worker_reform_seconds", "job_id"),
    ),
    Graph(
        title="State received from peers",
        text="Bytes a second while joiners, and ranks that were behind, are fed.",
        unit="Bps",
        queries=[
            (
                "rate(shoal_worker_state_received_bytes_total{job}[$__rate_interval])"
                " / rate(shoal_worker_state_receive_seconds_total{job}[$__rate_interval])",
                "{{instance}}",
            )
        ],
    ),
)

CHECKPOINTS = (
    Graph(
        title="Checkpoints a worker wrote",
        text="Checkpoints, or a worker's parts of them, and those that failed or were abandoned. "
        "Each failure is in that worker's log.",
        unit="none",
        queries=[
            (
                "sum by (outcome) "
                "(increase(shoal_worker_checkpoints_total{job}[$__rate_interval]))",
                "{{outcome}}",
            ),
        ],
    ),
    Graph(
        title="Time to write a checkpoint",
        text="Beside the training, which goes on. Close to the time between two: the disk is too "
        "slow, and saves wait for each other.",
        unit="s",
        queries=quantiles("shoal_worker_checkpoint_seconds", "job_id"),
    ),
    Graph(
        title="Checkpoints a worker uploaded",
        text="Checkpoints that reached the object storage, and attempts that failed or were given "
        "up. Each failure is in that worker's log.",
        unit="none",
        queries=[
            (
                "sum by (outcome) (increase(shoal_worker_uploads_total{job}[$__rate_interval]))",
                "{{outcome}}",
            ),
        ],
    ),
    Graph(
        title="Time to upload a checkpoint",
        text="Beside the training, which goes on. Longer than the time between two saves: "
        "checkpoints that nobody would keep are not uploaded.",
        unit="s",
        queries=quantiles("shoal_worker_upload_seconds", "job_id"),
    ),
    Graph(
        title="Upload to the object storage",
        text="Bytes per second of checkpoints' files, by the worker that uploads them.",
        unit="Bps",
        queries=[
            (
                "sum by (instance) (rate(shoal_worker_uploaded_bytes_total{job}[$__rate_interval]))",
                "{{instance}}",
            ),
        ],
    ),
    Graph(
        title="Upload backlog",
        text="Size of the checkpoints on a worker's disk that are not yet in the object storage.",
        unit="bytes",
        queries=[("sum by (instance) (shoal_worker_upload_backlog_bytes{job})", "{{instance}}")],
    ),
    Graph(
        title="Checkpoints to upload",
        text="Checkpoints on a worker's disk that are not yet in the object storage.",
        unit="none",
        queries=[
            ("sum by (instance) (shoal_worker_upload_backlog_checkpoints{job})", "{{instance}}")
        ],
    ),
)

ASYNCHRONOUS = (
    Graph(
        title="Staleness as workers saw it",
        text="Versions that were applied between a worker's pull and its push. About the number of "
        "workers is usual.",
        unit="none",
        queries=quantiles("shoal_worker_staleness", "job_id"),
    ),
    Graph(
        title="Pushes lost",
        text="Acknowledged updates, by partition, that a server no longer had: it lost its disk, "
        "or had no data directory. Else nothing.",
        unit="none",
        queries=[
            ("increase(shoal_worker_pushes_lost_total{job}[$__rate_interval]) > 0", "{{instance}}")
        ],
    ),
    Graph(
        title="Transports that could not be had",
        text="Shared memory, or a TCP connection, to a parameter server (a port that is shut, "
        "say): the next one took its place.",
        unit="short",
        queries=[
            (
                "sum by (transport) "
                "(increase(shoal_worker_transports_lost_total{job}[$__rate_interval])) > 0",
                "{{transport}}",
            ),
        ],
    ),
)

WORKERS = Board(
    uid="shoal-workers",
    title="Shoal: workers",
    text="Training, pauses at faults and joins, checkpoints, and what parameter servers answered.",
    rows=(
        ("Training", TRAINING),
        ("Pauses", PAUSES),
        ("Checkpoints", CHECKPOINTS),
        ("Asynchronous training", ASYNCHRONOUS),
    ),
)
