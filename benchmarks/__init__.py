"""Measurements: zeroengine beside its peers (`compare`), and itself in a large simulated world (`overhead`)."""
