"""The engine of zero1, zero2, zero3, fsdp and hsdp: parameters, gradients and optimizer state are
cut over the ranks.

`engine` trains. `layout` says where elements lie and which rank holds which shard,
`homes` in which memory, and `mirrors` where those of other ranks lie; a `unit` is gathered and
reduced together, `execution` does so in the passes, over `collectives`; `gradients` hands sums to
mirrors and optimizers. Between steps `sharded_state` holds it all, `whole_vectors` puts it
together, and `resharding` cuts it for other ranks.
"""
