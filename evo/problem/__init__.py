"""What is to be computed, and how it may vary: kernels, workloads, search spaces, genomes, rendered sources."""
