"""Steps, step boundaries, and recovery when ranks fail, leave or join.

- `step_lifecycle`: begins and ends steps. `step_commit`: the commit protocol, which is the same
  under every strategy. `step_boundaries`: membership changes between two steps.
- `formation`: forms the next generation of survivors and joiners. `joiner_state`: the state that
  joiners receive. `return_to_checkpoint`: restores a checkpoint if the remaining ranks do not have
  the complete state.
"""
