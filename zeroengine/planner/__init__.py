"""What a training job will take before it runs: memory, traffic and time of every legal layout."""
