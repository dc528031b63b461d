"""The training loader: turns a dataset and the current ranks into this rank's batches of each step.

Users create a `loader`, possibly from one of torch's (`torch_loaders`). `sampling` determines the
samples of a step and their distribution over the ranks; `cursor` records a loader's position, and
`step_batches` provides its next step (dealt or leased). `fetch` creates batches, in data workers or
in this process, and `iteration` runs the loops over epochs, steps and batches.

For streams, in `streaming/`, `stream` defines the supported kinds, and `reader` reads one from any
position, in this process or in data workers (`sources`). `fingerprints` detect whether a stream
repeats its items. `position_supply` deals a stream's steps by position, or `shard_supply` by
`lanes`; `supply` is common to both, and `evaluation` deals a stream for evaluation. `record` writes
down which samples were trained on.
"""
