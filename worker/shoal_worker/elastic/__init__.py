"""The session: one process's part in a training run whose ranks come, go and fail.

In come the calls of the user's loop, through loaders (`loader_interface`) and engines
(`strategy_interface`); out comes one outcome of each step, the same on all ranks that survive it.

- A process: `worker_process` opens the session and ends it, also on signals; `script_end` says
  whether the script has come to its end, `brief_errors` how an error of Shoal is shown there;
  `session` is what users and engines speak to.
- A step: `step` (the step in progress, and its control word), `step_lifecycle` (begins, commits and
  loses steps), `borders` (what happens between two of them; who leaves), `phase` (where the script
  is in the run), `committed_state` (what is true after the last step), `return_to_checkpoint`
  (where that is lost), `last_step` (nobody leaves while a peer is in doubt of it).
- A generation: `generation` and `group` (its ranks, connected, by `opening`), `formation` (makes
  the next one of survivors and joiners), `reconcile` (what the ranks make of their standings),
  `joiner_state` and `transfer` (state that travels).
- Membership: `member` is what the session asks of it; `membership` and `link` have it from the
  coordinator (`coordinator_messages`; `outbox`: what that is told), `fixed` where ranks are threads
  or MPI's.
- Between steps: `operations` (over a `channel`), `evaluation`, `collectives` (what scripts tell
  each other) and `torch_calls` (by torch's own functions). At any time: `first_of_machine` (what
  one process of a machine does before the others) and `files_written` (what several of them write
  at once).
- Beside the model: `schedulers_and_scalers`, `run_values` (plain values of the script's),
  `group_members` (the parameters in an optimizer's groups), and `row_store` (rows of sparse tables,
  which servers hold).
- Waiting: `waiting` (for what), `stall_watch` (whom this rank does not reach), `desync_detector`,
  `course` (what was issued in a step), `divergence`, `replicas_compared` and `batches_compared`
  (ranks that have diverged), `progress` (what heartbeats and metrics report),
  `told_loss` (the loss in it).
"""
