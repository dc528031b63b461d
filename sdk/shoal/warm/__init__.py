"""The warm process: it has imported torch and Shoal, and forks workers, so that each starts in
milliseconds instead of seconds.

`shoal.launcher.warm` starts it and commands it over an inherited socket; nobody else can.
`__main__` is the program, `forking` serves its launcher, `becoming` turns a forked child into what
a fresh interpreter would be, and `messages` is what both sides speak. See docs/decisions/0303.
"""
