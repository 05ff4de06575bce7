"""Where values and optimizer state live between uses: memory of the device, memory of the host, or a disk."""
