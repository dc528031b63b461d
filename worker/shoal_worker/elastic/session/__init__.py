"""The session of a process, and the calls that the user's script makes to it.

- `session`: one training run of this process. `worker_process`: opens the session, and closes it at
  the end of the process or on a signal.
- `evaluation`: evaluation on all ranks. `collectives`: values that scripts exchange between ranks.
  `torch_calls`: such exchanges through torch's own functions. `first_of_machine`: work of one
  process per machine.
- `script_end`: how the script ended. `brief_errors`: how an error is shown. `files_written`: a
  warning for a file that several ranks write. `desync_detector`: detects ranks that wait for
  different collectives.
"""
