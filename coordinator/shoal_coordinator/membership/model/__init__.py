"""Values of the pure core: the state of a job, the events that change it and their effects.

- `state`: the state of one job. Its parts: `spec` (the job's specification), `shards` (placement of
  parameters on servers), `batches` (leased batches), `replicas` (digests of the ranks' state).
- `events`: inputs. `effects`: writes and messages. `draft`: a state under change, with its effects.
- `pulse`: contents of heartbeats. `observation`: a snapshot for metrics and pages.
- `ranks`, `rank_changes`: the list of ranks, and the changes between two such lists.
- `reasons`: reason codes of refusals.
"""
