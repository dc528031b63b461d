"""The pure core: decides about membership from plain values.

No clock, no I/O, no randomness: the time, the nonce and what happened come in as arguments; what to
write and whom to tell go out as values. `transition.transition` is the one entry; the modules
beside it hold one function for each thing that can happen.
"""
