"""The training loader: in come a dataset and the ranks there are, out come this rank's batches of
each step.

`loader` is what users make, also of torch's (`torch_loaders`). `sampling` says which samples a step
has, and which rank gets which; `cursor` where a loader stands; `step_batches` where its next step
comes from (dealt, or leased); `fetch` makes batches, in data workers or here; `iteration` runs the
loops over epochs, steps and batches. Streams: `streams` says what one is, `stream_reader` reads it
from any position, here or (`sources`) in data workers; `fingerprints` tell whether it gave the same
as before. `position_supply` deals its steps, or `shard_supply` by `lanes`, with what
`stream_supply` has for both; `stream_evaluation` deals it for evaluation. `record` writes down
which samples were trained on.
"""
