"""Steps, and what happens between them when ranks fail, leave or join.

- `step_lifecycle`: begins and ends steps. `step_commit`: the commit protocol, the same under every
  strategy. `step_boundaries`: membership between two steps.
- `formation`: forms the next generation of survivors and joiners. `joiner_state`: the state that
  joiners receive. `return_to_checkpoint`: restores a checkpoint if no rank has the whole state any
  more.
"""
