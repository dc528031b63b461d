"""The session of a process and the calls of the user's script.

- `session`: one training run of this process. `worker_process` opens and ends it, also on signals.
- `evaluation`: evaluation on all ranks. `collectives`: what scripts send each other. `torch_calls`:
  the same through torch's own functions. `first_of_machine`: work of one process per machine.
- `script_end`: whether the script has come to its end. `brief_errors`: how an error is shown.
  `files_written`: a warning for a file that several ranks write. `desync_detector`: finds ranks
  that wait for different collectives.
"""
