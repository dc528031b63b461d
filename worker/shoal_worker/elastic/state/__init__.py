"""The run's state in this process, and the checks that compare it between ranks.

- `strategy_interface`: interface between the session and an engine, in both directions.
- `committed_state`: the state after the last committed step.
- `schedulers_and_scalers`: registered objects, and the parameters in an optimizer's groups.
  `run_values`: registered plain values. `early_stop`: the loop that early stopping has ended.
- `replicas_compared`: replicas that must be equal. `batches_compared`: batches that must differ.
"""
