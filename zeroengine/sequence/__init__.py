"""Public names of sequence parallelism: `sequence.layer.DistributedAttention`, `sequence.ring.ring_attention`."""
