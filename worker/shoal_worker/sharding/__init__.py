"""Engine of zero1, zero2, zero3, fsdp and hsdp: parameters, gradients and optimizer state are
sharded over the ranks.

`engine` trains. `layout` defines the location of elements and the rank of each shard, `placements`
the memory of shards, and `mirrors` the copies of other ranks' shards. The parameters of a `unit`
are gathered and reduced together, which `execution` does during the passes, over `collectives`.
`gradients` sends sums to mirrors and optimizers. Between steps `sharded_state` owns the whole
state, `whole_vectors` assembles the state, and `resharding` redistributes it.
"""
