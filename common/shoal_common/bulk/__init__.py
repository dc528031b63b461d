"""The parameter servers' bulk channel, as both ends see it: framing, memory that both share, and
the names of the transports."""
