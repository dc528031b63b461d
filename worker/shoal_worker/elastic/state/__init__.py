"""The run's state in this process, and the checks that compare it between ranks.

- `strategy_interface`: the interfaces between the session and a strategy's engine, in both
  directions.
- `committed_state`: the state after the last committed step.
- `schedulers_and_scalers`: registered objects, and the parameters in an optimizer's groups.
  `run_values`: registered plain values. `early_stop`: records which loop early stopping
  ended.
- `replicas_compared`: compares replicas, which must be the same. `batches_compared`: compares the
  ranks' batches, which must differ.
"""
