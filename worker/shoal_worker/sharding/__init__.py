"""The engine of zero1, zero2, zero3, fsdp and hsdp: parameters, gradients and optimizer state are cut over the ranks.

`engine` trains. `unit` and `layout` are what is cut, `division` says which rank holds which shard, `execution` gathers and reduces units in
the passes over `collectives`, `gradients` hands sums to mirrors and optimizers. Between steps `cut_state` holds it all: `resharding` and
`moving` cut it for other ranks, `assembling`, `optimizer_state` and `whole_state` put it together.
"""
