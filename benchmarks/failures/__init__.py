"""T17, the failure benchmark: the time that each system needs for the same training run under the
same seeded schedule of faults. A fault kills a worker and delays its replacement for a while (the
absence).

`schedule` draws the faults and `injector` carries them out. `systems` starts each system's workers
(`benchmarks.workers.failures`). The workers record in ledgers which samples they have trained and
which steps they have committed. From the ledgers, `account` determines which steps contributed to
the final parameters. `runs` measures one run, and `table` makes the table and its plot.
"""
