"""Engines of strategies in which every rank has a full replica of the model. Gradients are summed
across ranks in each step (ddp), or parameters are averaged every few steps (local_sgd).

- `engine`: the engine of ddp. `local_sgd`: the engine of local_sgd, a subclass of it.
- `reduction`: sums gradients during the backward pass. `buckets`: the layout of gradients in flat
  buckets, and their accumulation over micro-batches.
- `rounds`: state and averages of local_sgd's rounds.
"""
