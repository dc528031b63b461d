"""T17, the failure benchmark: the time that each system needs for the same training run while one
seeded schedule of faults kills its workers and keeps their places absent for a while.

`schedule` draws the faults and `injector` carries them out. `systems` starts each system's workers
(`benchmarks.workers.failures`), which record in ledgers which samples they try and commit.
`account` derives from the ledgers what counts in the final parameters. `runs` measures one run, and
`table` makes the table and its plot.
"""
