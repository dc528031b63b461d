"""Training states: conversion to JSON and tensors, copies, and comparison.

- `tree`: converts, copies and reassembles a state, including a state that is sharded across ranks.
  `serial`: converts a state to bytes.
- `device_reader`: copies data from a device to the host. `digest`: compares states. `fits`: checks
  whether a state fits a model or optimizer. `forwarding`: an optimizer that wraps another
  optimizer.
"""
