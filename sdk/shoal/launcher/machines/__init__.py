"""Knowledge about the machine on which a launcher runs: its provider's preemption notices
(`metadata`, `notices`), and its health (`checks`, run by `health`)."""
