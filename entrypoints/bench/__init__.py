"""The benchmarks behind `engine-bench`; the command line is `entrypoints.bench.cli`."""
