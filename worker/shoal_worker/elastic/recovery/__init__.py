"""Steps, and what happens between them when ranks fail, leave or join.

- `step_lifecycle`: begins and ends steps. `step_commit`: the commit protocol, the same under every
strategy. `step_boundaries`: membership between two steps.
"""
