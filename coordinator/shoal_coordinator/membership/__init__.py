"""Pure core of the coordinator: makes all membership decisions on plain values.

The core has no clock, no I/O and no randomness. The time, the nonce and the events are arguments;
writes and messages are returned as values. `transition.transition` is the single entry point. Each
other module handles some kinds of events: `members` and `servers` contain the rules about members
and parameter servers, `runs` the rules about a job's runs, and `leases` the rules about batches.
`model` contains the data types.
"""
