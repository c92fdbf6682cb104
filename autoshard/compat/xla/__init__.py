"""XLA's compilers, executables, threads and output."""
