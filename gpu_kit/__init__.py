"""Runs the GPU tests and benchmarks on a machine without a network connection. First run `make
gpu-kit` on a development machine that can reach a package index, then `python3 -m gpu_kit run` on
the machine with the GPU.

On the development machine, `wheels` determines which wheels the GPU machine lacks, and `packing`
downloads them into `.gpu-kit`. On the GPU machine, `environment` installs them, `stages` lists the
tests and benchmarks in order of importance, and `runner` runs them under time limits. `probe`
checks whether the installed torch has the names that Shoal uses. Modules that run before the
environment is ready import only the standard library.
"""
