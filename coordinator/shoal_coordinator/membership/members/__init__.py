"""Rules about members and their generations.

- `joining`, `leaving`: members join and leave. `recovery`: members return after Redis has lost
  generations. `streams`: a stream ends before its member left. `absence`: members without a stream.
- `generations`: decides when a new generation is due. `forming`: its members and their ranks.
- `machines`: machines that are refused, or excluded after repeated deaths.
- `failures`: failed collectives. `stalls`: steps that do not end. `stragglers`: members slower than
  the others.
"""
