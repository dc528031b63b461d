"""Rules about members and their generations.

- `joining` and `leaving`: a member joins or leaves. `recovery`: members return after Redis lost
  generations. `streams`: a stream ends before its member left. `absence`: members without a stream.
- `generations`: when a new generation is due. `forming`: its members and their ranks.
- `failures`: failed collectives. `stalls`: steps that do not end. `stragglers`: members slower than
  the others.
"""
