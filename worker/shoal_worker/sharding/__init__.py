"""Engine of zero1, zero2, zero3, fsdp and hsdp: parameters, gradients and optimizer state are
sharded over the ranks.

`engine` trains. `layout` defines the location of elements and the rank of each shard, `placements`
its memory, and `mirrors` the copies of other ranks' shards. A `unit` is gathered and reduced
together, which `execution` does during the passes, over `collectives`; `gradients` passes sums to
mirrors and optimizers. Between steps `sharded_state` holds everything, `whole_vectors` assembles
it, and `resharding` redistributes it.
"""
