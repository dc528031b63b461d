"""The warm process: imports torch and Shoal once and forks workers, so that each worker starts in
milliseconds instead of seconds.

`shoal.launcher.workers.warm` starts the warm process and controls it over an inherited socket that
no other process can access. `__main__` is the program, `forking` serves the launcher's requests,
`becoming` makes a forked child behave like a fresh interpreter, and `messages` is the protocol
between launcher and warm process (docs/explanation/launcher-and-deployment.md#start).
"""
