"""Checkpoints on disk: writes a committed state, or this rank's part of it, to a directory. The
directory is either complete or absent.

`saving` implements `shoal.save_checkpoint`, `shoal.resume` and the return to a checkpoint: it
decides which ranks write which files, and when. `files` creates, finds and reads checkpoints in a
directory; `shards` handles states that are split over the ranks; `frozen` stores parameters that do
not change separately, for both layouts. `manifest` implements the file that describes a checkpoint,
atomic directories, and files of tensors. `writer` is the thread that writes during training; it
also allows ranks to wait for a disk. `rows` handles the rows of sparse tables, which are on the
servers.

`place` tells a directory from a URL of an object storage; `remote` contains the checkpoints there,
and `uploads` is the thread that uploads them from a directory.
"""
