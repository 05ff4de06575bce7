"""Public names of sequence parallelism: `sequence.layer.DistributedAttention`, `sequence.ring.ring_attention`, and for layers of a
pipeline `sequence.shared.shared_attention`."""
