"""The warm process: has imported torch and Shoal, and forks workers, so that each starts in
milliseconds instead of seconds.

`shoal.launcher.workers.warm` starts it and controls it over an inherited socket; nobody else can.
`__main__` is the program, `forking` serves its launcher, `becoming` makes a forked child look like
a fresh interpreter, and `messages` is the protocol between both sides. See
docs/explanation/launcher-and-deployment.md#start.
"""
