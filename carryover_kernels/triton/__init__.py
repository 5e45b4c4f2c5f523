"""The Triton backend: one file an op, each with a launcher ``{op}_triton`` that takes and gives what the op does. Not yet run on hardware."""
