"""zerorun: starts the ranks of a job and ends them together. `cli` is the command line."""
