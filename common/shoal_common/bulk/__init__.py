"""Code for both ends of the parameter servers' bulk channel: framing, shared memory, and the names
of the transports."""
