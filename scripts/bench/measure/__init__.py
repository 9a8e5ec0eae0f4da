"""What the benchmarks share: the machine's ceilings, the models, interleaved timing, ours and the peers."""
