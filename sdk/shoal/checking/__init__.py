"""Static checks of training scripts for `shoal check`, which read the source and run none of it.

`script` analyses a file's names, calls and loops; `rules` finds lines that are wrong or wasteful
when several workers run them. A rule reports nothing if it is not certain.
"""
