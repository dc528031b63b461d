"""MPI, through mpi4py: for clusters that start ranks with mpiexec."""
