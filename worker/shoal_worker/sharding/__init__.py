"""Engine of zero1, zero2, zero3, fsdp and hsdp: parameters, gradients and optimizer state are
sharded across ranks.

`engine` performs steps. `layout` defines which elements are in which shard, and which rank has each
shard. `placements` provides memory for shards, and `mirrors` moves the mirrors of other ranks'
shards between host and device memory. The parameters of a `unit` are gathered, and their gradients
reduced, together; `execution` does this during the passes, using `collectives`. `gradients` passes
the summed gradients to mirror holders and optimizers. `sharded_state` owns the state between steps,
`unsharded_vectors` assembles it for checkpoints, and `resharding` redistributes it when the ranks
change.
"""
