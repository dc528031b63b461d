"""Runs the GPU tests and benchmarks on a machine without network: `make gpu-kit` where there is a
package index, then `python3 -m gpu_kit run` on that machine.

`wheels` decides which wheels the machine lacks; `packing` fetches them into `.gpu-kit`. On the
machine `environment` installs them, `stages` lists what runs there in order of value, and `runner`
runs it under time limits. `probe` asks the installed torch for the names that Shoal uses. Modules
that run before the environment is ready import the standard library alone.
"""
