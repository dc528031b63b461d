"""Information about a launcher's machine: preemption notices of its cloud provider (`metadata`,
`notices`), and its health (`checks`, run by `health`)."""
