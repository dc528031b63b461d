"""Static checks of training scripts for `shoal check`. The script is parsed but never executed.

`script` analyses a file's names, calls and loops; `loaders`, `sources` and `steps` find where its
batches come from and when its optimizers step; `rules` and `state` find lines that are wrong or
wasteful when several workers run them. Rules report only findings that are certain, except for data
whose source the script does not show. `conversion` writes an elastic copy for `shoal init`.
"""
