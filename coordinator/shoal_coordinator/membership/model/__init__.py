"""Values of the pure core: the state of a job, the events that change it and their effects.

- `state`: the state of one job. Its parts: `spec` (what the job asked for), `shards` (placement of
  parameters on servers), `batches` (leased batches), `replicas` (digests of the ranks' state).
- `events`: inputs. `effects`: writes and messages. `draft`: a state under change, with its effects.
- `pulse`: what heartbeats report. `observation`: a snapshot for metrics and pages.
- `ranks` and `rank_changes`: the list of ranks, and changes between two of them.
- `reasons`: reason codes of refusals.
"""
