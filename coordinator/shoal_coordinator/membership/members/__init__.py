"""Rules about members and their generations.

- `joining` and `leaving`: a member joins or leaves. `streams`: its stream opens or ends.
- `forming`: assigns ranks for the next generation. `generations`: its progress until it works.
- `absence`: members without a stream. `failures`: failed collectives. `stalls`: steps that do not
  end. `stragglers`: members slower than others. `recovery`: pauses of training, for reports.
"""
