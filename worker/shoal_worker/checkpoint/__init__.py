"""Checkpoints on disk: writes a committed state, or this rank's part of it, to a directory that is
either complete or absent.

`saving` implements `shoal.save_checkpoint`, `shoal.resume`, and the return to the newest checkpoint
if a run has lost its state: it decides which ranks write which files, and when. `files` creates,
finds and reads checkpoints in a directory; `shards` handles states that are sharded across ranks;
`frozen` handles parameters that do not change, which both layouts store separately. `manifest`
implements the file that describes a checkpoint, atomic directories, and tensor files, which
`tensor_writer` writes. `writer` is the thread that writes during training; it also lets ranks wait
for slow disks without a collective timing out. `rows` handles the rows of sparse tables, which the
parameter servers store.

`place` distinguishes a directory from the URL of an object store; `remote` reads and writes
checkpoints in an object store, and `uploads` is the thread that uploads them from a directory.
`comparison` implements `shoal compare`.
"""
