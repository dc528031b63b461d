"""The connected ranks of one generation, their collectives and transfers.

- `group`: the process group and its collectives. `transfer`: state sent to joiners over TCP.
- `operations`: operations between steps over a group, including results for ranks that missed them.
- `waiting`: reports what a rank waits for. `divergence`: errors for ranks whose scripts do
  different things.
"""
