"""This engine beside servers that people would otherwise pick, on the CPU: `make bench-peers`."""
