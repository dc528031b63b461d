"""The training loader: converts a dataset and the current ranks into this rank's batches of each
step.

Users create a `loader`, possibly from a loader of torch (`torch_loaders`). `sampling` determines
the samples of a step and their distribution over the ranks, and `balance` measures the ranks'
speeds for it. `cursor` records a loader's position, and `step_batches` provides its next step
(dealt or leased). `fetch` creates batches, in data workers or in this process, and `iteration` runs
the loops over epochs, steps and batches. `streaming` implements loaders of streams. `record` logs
which samples were trained on.
"""
