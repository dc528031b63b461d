"""MPI, through mpi4py, for clusters that start ranks with mpiexec. `backend` forms a `group`, whose
collectives return `works`."""
