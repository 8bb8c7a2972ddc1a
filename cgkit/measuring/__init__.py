"""What happened, measured: the benchmarks behind ``cgkit bench``. Reads the stages; no stage imports it."""
