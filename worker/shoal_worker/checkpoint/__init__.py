"""Checkpoints on disk: in comes a committed state, or this rank's part of it; out comes a directory
that is whole or is not there.

`saving` is what `shoal.save_checkpoint`, `shoal.resume` and a return to a checkpoint call: which
ranks write what, and when. `files` makes and finds checkpoints in a directory, and reads them;
`shards` has what is particular to a state that is cut over the ranks. `manifest` has the file that
says what a checkpoint is, the directories that appear whole, and one file of tensors; `writer` is
the thread that writes beside the training, and how ranks wait for a disk. `rows` has the rows of
sparse tables, which the servers hold.
"""
