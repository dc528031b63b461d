"""Run on this machine, alone or together with other launchers, from its start to its exit
status."""
