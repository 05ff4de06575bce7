"""Native operations and their twins in torch. Names are resolved on first use: building needs no torch."""
