"""The run's state in this process, and the checks that compare it between ranks.

- `strategy_interface`: interfaces of the session and of an engine to each other.
- `committed_state`: the state after the last committed step.
- `schedulers_and_scalers`: registered objects, and the parameters in an optimizer's groups.
  `run_values`: registered plain values. `early_stop`: records which loop was ended by early
  stopping.
- `replicas_compared`: compares replicas, which must be the same. `batches_compared`: compares the
  ranks' batches, which must differ.
"""
