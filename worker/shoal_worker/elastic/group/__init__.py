"""The connected ranks of one generation, their collectives and transfers.

- `group`: the process group and its collectives. `transfer`: state sent to joiners over TCP.
- `operations`: operations between steps, whose results are also sent to ranks that missed them.
- `waiting`: records what a rank is waiting for. `divergence`: errors for ranks whose scripts have
  diverged.
"""
