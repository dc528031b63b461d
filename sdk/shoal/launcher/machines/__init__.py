"""Information about the machine on which a launcher runs: preemption notices of its cloud provider
(`metadata`, `notices`), and its health (`checks`, run by `health`)."""
