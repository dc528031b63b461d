"""Rules about members and their generations.

- `joining`, `leaving`: members join and leave. `readmission`: members return after Redis has lost
  generations. `closed_streams`: a member's stream breaks although the member has not left.
  `absence`: members stop sending heartbeats.
- `generations`: decides when a new generation is due. `forming`: chooses its members and ranks.
- `machines`: excludes machines whose workers die repeatedly, and refuses new members on machines
  that are excluded or reported as unhealthy.
- `failures`: a collective fails. `stalls`: a step makes no progress. `stragglers`: a member is
  slower than the others.
"""
