"""Ranks of one generation, connected.

- `group`: the process group and its collectives. `transfer`: state sent to joiners over TCP.
- `operations`: operations between steps over a group, for readers among the ranks too.
- `waiting`: reports what a rank waits for. `divergence`: errors for ranks whose scripts do
  different things.
"""
