"""The session of a process, and the calls that the user's script makes to it.

- `session`: this process's part in a training run. `worker_process`: opens the session, and closes
  it when the process ends or receives a signal.
- `evaluation`: evaluation on all ranks. `collectives`: values that scripts exchange between ranks.
  `torch_calls`: the same through torch's own functions. `first_of_machine`: work that one process
  per machine does first.
- `script_end`: determines how the script ended. `brief_errors`: shortens errors for users.
  `files_written`: warns if several ranks write the same file. `desync_detector`: detects ranks that
  are waiting in different collectives.
"""
