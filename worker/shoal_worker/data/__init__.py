"""The training loader: determines which batches of a dataset this rank trains on in each step,
given the current ranks.

Users create a `loader`, possibly from a torch DataLoader (`torch_loaders`). `sampling` determines
the samples of a step and their distribution across ranks; `balance` measures the ranks' speeds for
that purpose. `cursor` records a loader's position, and `step_batches` provides its next step (dealt
or leased). `fetch` creates batches, in data workers or in this process, and `iteration` runs the
loops over epochs, steps and batches. `streaming` reads streams. `record` logs which samples were
trained on.
"""
