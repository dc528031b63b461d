"""Static checks of training scripts for `shoal check`. The script is parsed but never executed.

`script` analyses a file's names, calls and loops; `rules` finds lines that are wrong or wasteful
when several workers run them. Rules report only findings that are certain.
"""
