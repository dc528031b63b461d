"""Parts of the parameter servers' bulk channel shared by both ends: framing, shared memory, and the
names of the transports."""
