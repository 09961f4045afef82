"""Problems and the ways to solve them: kernels, workloads, search spaces, genomes, rendered sources."""
