"""Static checks of training scripts for `shoal check`. Reads the source; runs none of it.

`script` knows a file's names, calls and loops, `rules` finds lines that are wrong or wasteful when
several workers run them. A rule stays silent when it cannot tell.
"""
