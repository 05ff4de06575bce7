"""What the servers of tests/forks.py import before processes are forked from them, one module for each server."""
