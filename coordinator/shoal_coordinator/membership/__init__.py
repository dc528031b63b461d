"""The pure core: makes all membership decisions on plain values.

It has no clock, no I/O and no randomness. The time, the nonce and the events are arguments; writes
and messages are returned as values. `transition.transition` is the single entry point. Each of the
other modules handles one kind of event: `members` and `servers` have the rules about those, `runs`
about a job's runs and `leases` about batches. `model` has the values.
"""
