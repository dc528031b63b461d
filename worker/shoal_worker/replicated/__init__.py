"""Engines with a full replica of the model on every rank. Gradients are summed across ranks in each
step, or parameters are averaged every few steps.

`engine`: the engine of ddp. `local_sgd`: the engine of local_sgd, based on it. `reduction`: sums
gradients as they are computed. `buckets`: the layout of gradients, and their accumulation over
micro-batches. `rounds`: state and averages of local_sgd's rounds.
"""
