"""Models that are cut along several axes at once: pipeline x tensor x data. The engine of tensor, pipeline and hybrid.

`engine` trains; `layouts` says how any number of ranks is divided (`axes`), `blueprint` where each tensor lies then, `division` how the
ranks of this generation are connected, `parts` what this rank holds, and `gathering` how parts move when the ranks change.
"""
