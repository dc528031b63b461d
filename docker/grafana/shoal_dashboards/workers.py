"""The workers: training, pauses at faults and joins, and checkpoints."""

from __future__ import annotations

from shoal_dashboards.panels import Board, Graph, Listing, quantiles

TRAINING = (
    Graph(
        title="Loss",
        text="Loss of each worker's last committed step, if the script reports it.",
        unit="short",
        queries=[("shoal_worker_loss{job}", "{{instance}}")],
    ),
    Graph(
        title="Step time",
        text="Time from one committed step to the next. A 99th percentile far above the median "
        "indicates stragglers or faults.",
        unit="s",
        queries=quantiles("shoal_worker_step_seconds", "job_id"),
    ),
    Graph(
        title="Waiting for peers",
        text="Fraction of the time that a rank waits in collectives. A rank far below the others "
        "delays them; if all are high, the network is slow.",
        unit="percentunit",
        queries=[("rate(shoal_worker_wait_seconds_total{job}[$__rate_interval])", "{{instance}}")],
    ),
    Graph(
        title="Share of a step's micro-batches",
        text="Micro-batches of each rank in a step, relative to an equal share, while they are "
        "dealt by speed; 0 while they are dealt evenly.",
        unit="short",
        queries=[("shoal_worker_step_share{job}", "{{instance}}")],
    ),
    Graph(
        title="Steps",
        text="Steps per second that each worker committed, and that were aborted by a fault. The "
        "lines of committed steps of one job coincide.",
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
        text="World size and number of each worker's generation. Workers that differ from the "
        "others for longer than a step are being evicted.",
        unit="none",
        queries=[
            ("shoal_worker_world_size{job}", "{{instance}} world size"),
            ("shoal_worker_generation{job}", "{{instance}} generation"),
        ],
    ),
    Graph(
        title="Rank",
        text="Rank of each worker, and when it changed.",
        unit="none",
        queries=[("shoal_worker_rank{job}", "{{instance}}")],
    ),
    Listing(
        title="Members and ranks",
        text="Current member id and rank of each worker. Other series are named by host and slot, "
        "which stay the same when ranks change.",
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
        text="Time from the detection of a failure to the next committed step, on the slowest "
        "survivor.",
        unit="s",
        queries=quantiles("shoal_worker_recovery_seconds", "job_id"),
    ),
    Graph(
        title="Pause at a join",
        text="Pause of the other ranks at a step boundary until the joiners have received the "
        "state.",
        unit="s",
        queries=quantiles("shoal_worker_join_seconds", "job_id"),
    ),
    Graph(
        title="Forming a generation",
        text="Time to connect the new process group and reconcile the state of its ranks, which "
        "is the part of a pause after detection.",
        unit="s",
        queries=quantiles("shoal_worker_reform_seconds", "job_id"),
    ),
    Graph(
        title="State received from peers",
        text="Bytes per second that joiners, and ranks that were behind, receive from peers.",
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
        title="Checkpoints written",
        text="Checkpoints, or a worker's parts of them, that were written, failed or were "
        "abandoned. Each failure is in that worker's log.",
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
        text="Checkpoints are written in the background of training. If this time is close to the "
        "interval between checkpoints, the disk is too slow, and saves wait for each other.",
        unit="s",
        queries=quantiles("shoal_worker_checkpoint_seconds", "job_id"),
    ),
    Graph(
        title="Checkpoints a worker uploaded",
        text="Number of uploads to the object store, by outcome: written, failed, or given up "
        "because a later save removed the checkpoint first. The worker's log explains each "
        "failure.",
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
        text="Checkpoints are uploaded in the background of training. If this time is longer than "
        "the interval between saves, checkpoints that a later save would remove are not "
        "uploaded.",
        unit="s",
        queries=quantiles("shoal_worker_upload_seconds", "job_id"),
    ),
    Graph(
        title="Upload to the object store",
        text="Bytes of checkpoint files that each worker uploads per second.",
        unit="Bps",
        queries=[
            (
                "sum by (instance) "
                "(rate(shoal_worker_uploaded_bytes_total{job}[$__rate_interval]))",
                "{{instance}}",
            ),
        ],
    ),
    Graph(
        title="Upload backlog",
        text="Bytes of the checkpoints that are on a worker's disk and not yet in the object "
        "storage.",
        unit="bytes",
        queries=[("sum by (instance) (shoal_worker_upload_backlog_bytes{job})", "{{instance}}")],
    ),
    Graph(
        title="Checkpoints to upload",
        text="Number of checkpoints that are on a worker's disk and not yet in the object store.",
        unit="none",
        queries=[
            ("sum by (instance) (shoal_worker_upload_backlog_checkpoints{job})", "{{instance}}")
        ],
    ),
)

ASYNCHRONOUS = (
    Graph(
        title="Staleness measured by workers",
        text="Number of versions that other workers' pushes created between a worker's pull and "
        "its push. It is usually about the number of workers.",
        unit="none",
        queries=quantiles("shoal_worker_staleness", "job_id"),
    ),
    Graph(
        title="Pushes lost",
        text="Acknowledged pushes, counted per partition, that a server lost because its disk was "
        "lost or it had no data directory. Normally 0.",
        unit="none",
        queries=[
            ("increase(shoal_worker_pushes_lost_total{job}[$__rate_interval]) > 0", "{{instance}}")
        ],
    ),
    Graph(
        title="Unavailable transports",
        text="Number of times that shared memory or a TCP connection to a parameter server was "
        "not available, for example because of a closed port, and the next transport was "
        "used.",
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
    text="Training, pauses at faults and joins, checkpoints, and calls to parameter servers.",
    rows=(
        ("Training", TRAINING),
        ("Pauses", PAUSES),
        ("Checkpoints", CHECKPOINTS),
        ("Asynchronous training", ASYNCHRONOUS),
    ),
)
